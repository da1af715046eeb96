"""bytes -> Archive: the arrays of a safetensors or npz file, none larger than it may be.

The kind of file is told by its bytes. Nothing in it is run: an .npy header is matched, not
evaluated, and pickled objects are refused by their type. What a header declares is compared with
the limit, and with what the file can hold at all, before memory is reserved or a byte inflated.
"""

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from app.errors import BadArrays, BrokenArchive, NotAnArchive, RequestError, TooLarge
from app.io import MOST_INFLATION, PIECE_BYTES

NAMES: Final = ("probs", "scores", "offsets", "affine")

HEADER_BYTES: Final = 16 << 10
"""Most that an honest header of four arrays takes, several times over."""

DIRECTORY_BYTES: Final = 1 << 20
"""Most of a ZIP directory that is read: it may list millions of files."""

ZIP_MAGIC: Final = b"PK\x03\x04"
NPY_MAGIC: Final = b"\x93NUMPY"
NPY_KEYS: Final = (
    re.compile(r"'descr'\s*:\s*'([^']{2,32})'"),
    re.compile(r"'fortran_order'\s*:\s*(True|False)\b"),
    re.compile(r"'shape'\s*:\s*\(([\d\s,L]*)\)"),
)
NPY_TYPE: Final = re.compile(r"[<>=|]?[fiu][1248]")

FLOATS: Final = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
SAFETENSORS_TYPES: Final = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}

# What zipfile and zlib raise for files that are not what they seem; they have no common base.
ODDITIES: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Archive:
    """The arrays of a file, None where it has none of that name.

    Attributes:
        probs: Floats of any shape and memory layout.
        scores: Likewise.
        offsets: Likewise.
        affine: Real numbers of any shape.
    """

    probs: Tensor | None = None
    scores: Tensor | None = None
    offsets: Tensor | None = None
    affine: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Declared:
    """What the header of an .npy file says."""

    dtype: np.dtype[np.generic]
    fortran: bool
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_archive(content: bytes, most_bytes: int) -> Archive:
    """Read a file of arrays.

    Args:
        content: The whole file: safetensors, or npz (stored or deflated).
        most_bytes: Bytes that all of its arrays may have together.

    Returns:
        The arrays, in memory of their own, in the order in which they are stored.

    Raises:
        NotAnArchive: The bytes are something else.
        BrokenArchive: Truncated, corrupt, encrypted, or inflates past what it declares.
        TooLarge: The arrays declare more bytes than allowed.
        BadArrays: An array of unknown name, named twice, empty, or not of real numbers.
    """
    if content[:4] == ZIP_MAGIC:
        arrays = _read_npz(content, most_bytes)
    elif content[8:9] == b"{":
        arrays = _read_safetensors(content, most_bytes)
    else:
        raise NotAnArchive("expected a safetensors or npz file, got bytes of another kind")
    for name, array in arrays.items():
        if name != "affine" and array.dtype not in FLOATS.values():
            raise _bad_type(name, str(array.dtype).removeprefix("torch."))
    return Archive(**arrays)


def _read_safetensors(content: bytes, most_bytes: int) -> dict[str, Tensor]:
    head = int.from_bytes(content[:8], "little")
    if head > HEADER_BYTES:
        raise BrokenArchive(f"expected a header of at most {HEADER_BYTES:,} bytes, got {head:,}")
    _check_size(len(content) - 8 - head, most_bytes)
    try:
        entries = deserialize(content)
    except SafetensorError as error:
        raise BrokenArchive("expected a sound safetensors file, got a broken one") from error
    arrays = {}
    for name, entry in entries:
        _check_name(name)
        shape = tuple(entry["shape"])
        _check_shape(name, shape)
        if entry["dtype"] not in SAFETENSORS_TYPES:
            raise _bad_type(name, entry["dtype"])
        # The library gives each array memory of its own: writable, which torch asks for.
        flat = torch.frombuffer(entry["data"], dtype=SAFETENSORS_TYPES[entry["dtype"]])
        arrays[name] = flat.reshape(shape)
    return arrays


def _read_npz(content: bytes, most_bytes: int) -> dict[str, Tensor]:
    with _odd_is_broken():
        archive = zipfile.ZipFile(_Bounded(content))
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        _check_name(name)
        if name in entries:
            raise BadArrays(f"array {name!r}: expected it once, got it twice")
        if info.flag_bits & 1:
            raise BrokenArchive(f"array {name!r}: expected plain data, got encrypted data")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BrokenArchive(
                f"array {name!r}: expected it stored or deflated, got method {info.compress_type}"
            )
        entries[name] = info
    declared = {}
    for name, info in entries.items():
        with _odd_is_broken(), archive.open(info) as stream:
            declared[name] = _read_declaration(name, stream)
        _check_held(name, declared[name], info, len(content))
    _check_size(sum(one.size for one in declared.values()), most_bytes)
    arrays = {}
    for name, info in entries.items():
        with _odd_is_broken(), archive.open(info) as stream:
            _read_declaration(name, stream)
            arrays[name] = _inflate(name, stream, declared[name])
    return arrays


def _read_declaration(name: str, stream: Any) -> _Declared:  # noqa: ANN401 - zipfile's stream
    """Read the header of an .npy file, of version 1, 2 or 3; numpy.lib.format has the format."""
    magic = stream.read(8)
    if magic[:6] != NPY_MAGIC or magic[6:7] not in (b"\1", b"\2", b"\3"):
        raise BrokenArchive(f"array {name!r}: expected an .npy file of version 1 to 3, got another")
    length = int.from_bytes(stream.read(2 if magic[6] == 1 else 4), "little")
    if length > HEADER_BYTES:
        raise BrokenArchive(
            f"array {name!r}: expected a header of at most {HEADER_BYTES:,} bytes, got {length:,}"
        )
    text = stream.read(length).decode("latin-1")
    found = [key.findall(text) for key in NPY_KEYS]
    if len(found[0]) == 1 and not NPY_TYPE.fullmatch(found[0][0]):
        raise _bad_type(name, found[0][0])
    if any(len(values) != 1 for values in found):
        raise BadArrays(f"array {name!r}: expected one plain array of numbers, got something else")
    (descr,), (fortran,), (lengths,) = found
    parts = [part for part in re.split(r"[\sL,]+", lengths) if part]
    shape = tuple(int(part) for part in parts)
    _check_shape(name, shape)
    return _Declared(_dtype(name, descr), fortran == "True", shape)


def _dtype(name: str, descr: str) -> np.dtype[np.generic]:
    try:
        return np.dtype(descr)
    except TypeError:  # An 8-bit float, say.
        raise _bad_type(name, descr) from None


def _inflate(name: str, stream: Any, declared: _Declared) -> Tensor:  # noqa: ANN401 - as above
    flat = np.empty(math.prod(declared.shape), declared.dtype)
    target = flat.view(np.uint8).data
    filled = 0
    while filled < len(target):
        count = stream.readinto(target[filled : filled + PIECE_BYTES])
        if count == 0:
            raise BrokenArchive(
                f"array {name!r}: expected {len(target):,} bytes, got {filled:,}: it is truncated"
            )
        filled += count
    # Reading on also makes zipfile compare the checksum.
    if stream.read(1):
        raise BrokenArchive(f"array {name!r}: expected {len(target):,} bytes, got more")
    native = flat.astype(declared.dtype.newbyteorder("="), copy=False)
    if native.dtype.kind == "u":  # torch knows little but uint8, and an affine is small.
        native = native.astype(np.int64)
    return torch.from_numpy(native.reshape(declared.shape, order="F" if declared.fortran else "C"))


def _check_name(name: str) -> None:
    if name not in NAMES:
        expected = ", ".join(NAMES)
        raise BadArrays(f"array {name[:64]!r}: expected one of {expected}, got an unknown name")


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) > 8 or 0 in shape:
        raise BadArrays(
            f"array {name!r}: expected at most 8 axes, none empty, got shape {list(shape[:9])}"
        )


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise TooLarge(f"expected arrays of at most {most_bytes:,} bytes together, got {size:,}")


def _check_held(name: str, declared: _Declared, info: zipfile.ZipInfo, length: int) -> None:
    """Refuse a header that declares more than the file can hold, however well it is compressed."""
    gain = 1 if info.compress_type == zipfile.ZIP_STORED else MOST_INFLATION
    most = gain * min(info.compress_size, length)
    if declared.size > most:
        raise BrokenArchive(
            f"array {name!r}: expected {declared.size:,} bytes, as its header declares, "
            f"got a file that holds {most:,} at most"
        )


def _bad_type(name: str, got: str) -> BadArrays:
    expected = ", ".join(FLOATS)
    return BadArrays(
        f"array {name!r}: expected numbers of {expected} (bfloat16 in safetensors only), got {got}"
    )


@contextmanager
def _odd_is_broken() -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except ODDITIES as error:
        raise BrokenArchive("expected a sound npz file, got a broken one") from error


class _Bounded(io.BytesIO):
    """A file that is never read far at once, so that a directory of millions is not, either."""

    def read(self, size: int | None = -1) -> bytes:
        left = self.getbuffer().nbytes - self.tell()
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > DIRECTORY_BYTES:
            raise zipfile.BadZipFile("a directory too large")
        return super().read(wanted)
