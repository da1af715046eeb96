"""Path of a scan -> its bytes, as one file of a format that a service reads.

A header of MetaImage (.mhd), NRRD (.nhdr) or NIfTI (.hdr) gets the voxels that it has in another
file, and what only nibabel reads becomes NIfTI. Whatever reads files by their paths does so here,
so that all else, the service included, knows none but whole files of few formats.
"""

import gzip
import io
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, cast

import nibabel
import numpy as np
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from nibabel.spatialimages import SpatialImage

from app.errors import NotAVolume
from app.io.header import TEXT_BYTES
from app.io.metaimage_header import DATA
from app.io.nrrd_header import DETACHED

CONVERTED: Final = (".mnc", ".HEAD", ".PAR")
"""Suffixes of MINC, AFNI and Philips; MINC 2 takes the extra minc."""

METAIMAGE_FIELD: Final = re.compile(rf"^\s*{DATA}\s*=(.*)$".encode(), re.MULTILINE)
NRRD_FIELD: Final = re.compile(
    rf"^{DETACHED.pattern}(.*)\n?".encode(), re.MULTILINE | re.IGNORECASE
)
BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")


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
    """Read what ``open_file`` opens."""
    with open_file(path) as file:
        return file.read()


def open_file(path: Path) -> io.BufferedIOBase:
    """Open the file of a scan, with voxels that are in a file of their own; it is read if need be.

    Raises:
        NotAVolume: A header names voxels that are not beside it, or nibabel does not read a file.
    """
    if _is_converted(path):
        return io.BytesIO(_convert(path))
    pair = _find_pair(path)
    if pair is None:
        return path.open("rb")
    if (voxels := pair.find_voxels(path)) is None:
        raise NotAVolume(
            f"expected the voxels of {path.name} in one file beside it, got none by the name that "
            f"it gives, {pair.name!r}"
        )
    return io.BytesIO(pair.start + voxels.read_bytes())


def files_of(path: Path) -> tuple[Path, ...]:
    """List the files that are read of a scan's path."""
    if _is_converted(path):
        with suppress(Exception):  # It is said when the scan is read.
            files = (Path(str(file.filename)) for file in _open(path).file_map.values())
            return (path, *(file for file in files if file.name != path.name))
    with suppress(OSError):
        if (pair := _find_pair(path)) and (voxels := pair.find_voxels(path)):
            return path, voxels
    return (path,)


def _is_converted(path: Path) -> bool:
    return path.name.endswith(CONVERTED) and path.is_file()


def _open(path: Path) -> SpatialImage:
    """Open what a path, or a link of the same name, leads to: other files of a scan lie there."""
    target = path.resolve()
    return cast("SpatialImage", nibabel.load(target if target.name == path.name else path))


def _convert(path: Path) -> bytes:
    """Write what nibabel reads as NIfTI, whose affine is float64."""
    try:
        image = _open(path)
        voxels = np.asanyarray(image.dataobj)
        if voxels.dtype == np.float64:  # What is scaled, and of less precision.
            voxels = voxels.astype(np.float32)
        single = nibabel.Nifti2Image(voxels, image.affine)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # What the system says, such as that there is no file.
        if isinstance(error, ModuleNotFoundError):
            raise NotAVolume(
                f"expected the package {error.name}, which {path.name} takes: pip install "
                "'landmarkd[minc]'"
            ) from error
        raise NotAVolume(
            f"expected a scan that nibabel reads, got {path.name}, of which it says: {error}"
        ) from error
    if path.name.endswith(".mnc") and voxels.ndim > 3:  # Whose frames come first.
        raise NotAVolume(f"expected a MINC file of three axes, got {voxels.ndim} in {path.name}")
    single.header.set_xyzt_units("mm")
    content: bytes = single.to_bytes()
    return content


def _find_pair(path: Path) -> _Pair | None:
    """Tell a header of voxels in another file, by its suffix and what it says; else None."""
    if not path.is_file():  # Such as a pipe, which can be read once.
        return None
    if path.name.endswith(".mhd"):
        return _pair_of_metaimage(_read_start(path))
    if path.name.endswith(".nhdr"):
        return _pair_of_nrrd(_read_start(path))
    return _pair_of_nifti(path) if path.name.endswith((".hdr", ".hdr.gz")) else None


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(TEXT_BYTES)


def _pair_of_metaimage(head: bytes) -> _Pair | None:
    field = METAIMAGE_FIELD.search(head)
    if field is None or field[1].strip().upper() == b"LOCAL":
        return None
    return _Pair(head[: field.start()] + f"{DATA} = LOCAL\n".encode(), _name(field[1]))


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
            head = file.read(Nifti2Header.sizeof_hdr)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return None
    start = _start_of_single(head, Nifti1Header) or _start_of_single(head, Nifti2Header)
    if start is None:
        return None
    stem = path.name.removesuffix(".gz").removesuffix(".hdr")
    if path.with_name(f"{stem}.img").is_file() or not path.with_name(f"{stem}.img.gz").is_file():
        return _Pair(start, f"{stem}.img")
    # Files of gzip, one behind the other, are one.
    return _Pair(gzip.compress(start), f"{stem}.img.gz")


def _start_of_single(head: bytes, kind: type[Nifti1Header]) -> bytes | None:
    """Write the header of a pair as that of a single file; None if it is none of that kind."""
    if len(head) < kind.sizeof_hdr:
        return None
    fields = kind(head[: kind.sizeof_hdr], check=False)
    if fields["magic"] != kind.pair_magic:
        return None
    fields["magic"] = kind.single_magic
    fields["vox_offset"] += kind.single_vox_offset
    return bytes(fields.binaryblock.ljust(kind.single_vox_offset, b"\0"))
