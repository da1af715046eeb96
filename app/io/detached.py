"""Path of a scan -> its bytes; a header becomes one file with the voxels that it has in another.

So do headers of MetaImage (.mhd), NRRD (.nhdr) and NIfTI (.hdr). Whatever reads files by their
paths joins these here, so that all else, the service included, knows none but whole files.
"""

import gzip
import os
import re
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from app.errors import NotAVolume

HEADER_BYTES: Final = 1 << 20
"""Of a header that is text, at most."""

METAIMAGE_FIELD: Final = re.compile(rb"^\s*ElementDataFile\s*=(.*)$", re.MULTILINE)
NRRD_FIELD: Final = re.compile(rb"^data ?file\s*:(?!=)(.*)\n?", re.MULTILINE | re.IGNORECASE)
BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")

PAIR_MAGIC: Final = b"ni1\0"
OFFSET_AT: Final = 108
"""Where a NIfTI-1 header says at which byte of the file its voxels begin, as float32."""

MAGIC_AT: Final = 344
PAIR_BYTES: Final = MAGIC_AT + len(PAIR_MAGIC)
EXTENSIONS: Final = bytes(4)
"""Says that none follow the header."""


class _Pair(NamedTuple):
    """A header, as a file that holds its voxels begins, and the name of the file that has them."""

    start: bytes
    name: str

    def find_voxels(self, header: Path) -> Path | None:
        """Return the file if it lies beside the header.

        A header from elsewhere must not choose which files of this machine are read, and sent.
        """
        if Path(self.name).name != self.name:
            return None
        # A link to a header, as of a data set made of several, lies elsewhere than its voxels.
        around = (file.with_name(self.name) for file in (header, header.resolve()) if self.name)
        return next((file for file in around if file.is_file()), None)


def read_file(path: Path) -> bytes:
    """Read the file of a scan, with voxels that are in a file of their own.

    Raises:
        NotAVolume: A header names voxels that are not beside it.
    """
    pair = _find_pair(path)
    if pair is None:
        return path.read_bytes()
    if (voxels := pair.find_voxels(path)) is None:
        raise NotAVolume(
            f"expected the voxels of {path.name} in one file beside it, got none by the name that "
            f"it gives, {pair.name!r}"
        )
    return pair.start + voxels.read_bytes()


def files_of(path: Path) -> tuple[Path, ...]:
    """List the files that are read of a scan's path."""
    voxels = None
    with suppress(OSError):
        if pair := _find_pair(path):
            voxels = pair.find_voxels(path)
    return (path,) if voxels is None else (path, voxels)


def _find_pair(path: Path) -> _Pair | None:
    """Tell a header of voxels in another file, by its suffix and what it says; else None."""
    if not path.is_file():
        return None  # Such as a pipe, which can be read once.
    if path.name.endswith(".mhd"):
        return _pair_of_metaimage(_read_start(path))
    if path.name.endswith(".nhdr"):
        return _pair_of_nrrd(_read_start(path))
    return _pair_of_nifti(path) if path.name.endswith((".hdr", ".hdr.gz")) else None


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEADER_BYTES)


def _pair_of_metaimage(head: bytes) -> _Pair | None:
    field = METAIMAGE_FIELD.search(head)
    if field is None or field[1].strip().upper() == b"LOCAL":
        return None
    return _Pair(head[: field.start()] + b"ElementDataFile = LOCAL\n", _name(field[1]))


def _pair_of_nrrd(head: bytes) -> _Pair | None:
    lines = BLANK_LINE.split(head, maxsplit=1)[0]
    field = NRRD_FIELD.search(lines)
    if field is None:
        return None
    others = lines[: field.start()] + lines[field.end() :]
    return _Pair(others.rstrip(b"\r\n") + b"\n\n", _name(field[1]))


def _name(field: bytes) -> str:
    return os.fsdecode(field.strip().removeprefix(b"./"))


def _pair_of_nifti(path: Path) -> _Pair | None:
    """Make the header of a pair that of a single file; see nifti1.h on ``magic``."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            head = bytearray(file.read(PAIR_BYTES))
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return None
    if head[MAGIC_AT:] != PAIR_MAGIC:
        return None
    order = "<" if head.startswith(struct.pack("<i", PAIR_BYTES)) else ">"
    (offset,) = struct.unpack_from(f"{order}f", head, OFFSET_AT)
    struct.pack_into(f"{order}f", head, OFFSET_AT, PAIR_BYTES + len(EXTENSIONS) + offset)
    head[MAGIC_AT:] = b"n+1\0"
    start = bytes(head) + EXTENSIONS
    stem = path.name.removesuffix(".gz").removesuffix(".hdr")
    if path.with_name(f"{stem}.img").is_file() or not path.with_name(f"{stem}.img.gz").is_file():
        return _Pair(start, f"{stem}.img")
    # Files of gzip, one behind the other, are one.
    return _Pair(gzip.compress(start), f"{stem}.img.gz")
