"""Bytes -> Archive: the arrays of a safetensors or npz file, none larger than it may be.

Nothing in a file is run: the header of an .npy file is parsed as a literal of bounded length, and
objects, which would be unpickled, are refused by their type. What a header declares is compared
with the limit, and with what the file holds, before memory is reserved or a byte inflated.
"""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from tokenize import TokenError
from typing import Final

import numpy as np
import torch
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from pydantic import NonNegativeInt, TypeAdapter
from pydantic_core import from_json
from torch import Tensor
from typing_extensions import TypedDict

from app.compute import is_out_of_memory
from app.errors import BadArrays, BrokenArchive, NotAnArchive, RequestError, TooLarge
from app.io import Content, MemoryFile

NAMES: Final = ("probs", "scores", "offsets", "affine")

ZIP_MAGIC: Final = b"PK\x03\x04"

HEADER_BYTES: Final = 16 << 10
"""Most that an honest header of four arrays takes, several times over."""

DIRECTORY_BYTES: Final = 4 << 10
"""Most that the ZIP directory of four arrays takes, several times over; it may list millions of
files, and each becomes a Python object on the event loop."""

CHUNK_BYTES: Final = 1 << 18
"""Bytes inflated at a time."""

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS: Final = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)

TYPES: Final = dict(
    zip(
        ("F16", "BF16", "F32", "F64", *("I8", "I16", "I32", "I64"), *("U8", "U16", "U32", "U64")),
        (*FLOATS, *INTEGERS),
        strict=True,
    )
) | {"BOOL": torch.bool}
"""By their names in safetensors; which of them an array may have is checked as of npz files."""

# What the libraries raise for malformed files; most have no common base.
MALFORMED: Final = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, LookupError, OSError, RuntimeError, ValueError),
)
MALFORMED_LITERAL: Final = (*MALFORMED, SyntaxError, TokenError, TypeError, MemoryError)


class _Entry(TypedDict):
    """What the header of a safetensors file says of an array."""

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


ENTRIES: Final = TypeAdapter(dict[str, _Entry])


@dataclass(frozen=True, slots=True)
class Archive:
    """The arrays of a file, of any shape and memory layout; None where it has none of that name.

    Attributes:
        probs: Floats.
        scores: Floats.
        offsets: Floats.
        affine: Real numbers.
    """

    probs: Tensor | None = None
    scores: Tensor | None = None
    offsets: Tensor | None = None
    affine: Tensor | None = None


def read_archive(content: Content, max_bytes: int) -> Archive:
    """Read a file of arrays.

    Args:
        content: The whole file: safetensors, or npz (stored or deflated).
        max_bytes: Bytes that all of its arrays may have together.

    Returns:
        The arrays, in memory of their own, in the order in which they are stored.

    Raises:
        NotAnArchive: The bytes are something else.
        BrokenArchive: Truncated, corrupt, encrypted, or not as long as it declares.
        TooLarge: The arrays declare more bytes than allowed.
        BadArrays: An array of unknown name, named twice, empty, or not of real numbers.
    """
    if content[:4] == ZIP_MAGIC:
        with _expect_sound("npz"):
            arrays = _read_npz(content, max_bytes)
    elif content[8:9] == b"{":
        with _expect_sound("safetensors"):
            arrays = _read_safetensors(content, max_bytes)
    else:
        raise NotAnArchive("expected a safetensors or npz file, got bytes of another kind")
    for name, array in arrays.items():
        if array.dtype not in (FLOATS + INTEGERS if name == "affine" else FLOATS):
            raise _bad_type(name, str(array.dtype).removeprefix("torch."))
    return Archive(**arrays)


def count_array_bytes(content: Content) -> int:
    """Return how many bytes the arrays of a file take, as it declares; none of them is read.

    Raises:
        BrokenArchive: The directory of an npz file is corrupt.
    """
    if content[:4] != ZIP_MAGIC:
        return len(content)
    with _expect_sound("npz"):
        return sum(info.file_size for info in _open_npz(content).infolist())


def _read_safetensors(content: Content, max_bytes: int) -> dict[str, Tensor]:
    """Read safetensors; the library would copy all of it twice while no other thread can run."""
    header = int.from_bytes(content[:8], "little")
    if header > HEADER_BYTES:
        raise BrokenArchive(f"expected a header of at most {HEADER_BYTES:,} bytes, got {header:,}")
    start = 8 + header
    held = len(content) - start
    _check_size(held, max_bytes)
    declared = from_json(bytes(content[8:start]))
    declared.pop("__metadata__", None)
    arrays: dict[str, Tensor] = {}
    total = 0
    for name, entry in ENTRIES.validate_python(declared).items():
        _check_name(name)
        _check_shape(name, entry["shape"])
        dtype = TYPES.get(entry["dtype"])
        if dtype is None:
            raise _bad_type(name, entry["dtype"][:16])
        size, (first, last) = math.prod(entry["shape"]) * dtype.itemsize, entry["data_offsets"]
        total += size
        if last - first != size or total > held:
            raise ValueError(f"expected {size:,} bytes of {held:,}, got {first:,} to {last:,}")
        data = np.frombuffer(content, np.uint8, size, start + first).copy()
        arrays[name] = torch.from_numpy(data).view(dtype).reshape(entry["shape"])
    return arrays


def _read_npz(content: Content, max_bytes: int) -> dict[str, Tensor]:
    archive = _open_npz(content)
    arrays: dict[str, Tensor] = {}
    total = 0
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        _check_name(name)
        if name in arrays:
            raise BadArrays(f"array {name!r}: expected it once, got it twice")
        if info.flag_bits & 1:
            raise BrokenArchive(f"array {name!r}: expected plain data, got encrypted data")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BrokenArchive(
                f"array {name!r}: expected it stored or deflated, got method {info.compress_type}"
            )
        with archive.open(info) as stream:
            start = io.BytesIO(stream.read(HEADER_BYTES))
            shape, fortran, dtype = _read_npy_header(name, start)
            size, held = math.prod(shape) * dtype.itemsize, info.file_size - start.tell()
            if size != held:
                raise BrokenArchive(
                    f"array {name!r}: expected {size:,} bytes, as its header declares, "
                    f"got a file that holds {held:,}"
                )
            total += size
            _check_size(total, max_bytes)
            array = np.empty(math.prod(shape), dtype)
            # At the end, zipfile compares the checksum.
            rest = iter(partial(stream.read, CHUNK_BYTES), b"")
            _fill(array.view(np.uint8).data, chain([start.read()], rest))
        # Torch knows no other byte order.
        native = array.astype(dtype.newbyteorder("="), copy=False)
        arrays[name] = torch.from_numpy(native.reshape(shape, order="F" if fortran else "C"))
    return arrays


def _open_npz(content: Content) -> zipfile.ZipFile:
    """Read the directory of an npz file, unless that is longer than of any that could be read."""
    file = _BoundedReads(content)
    archive = zipfile.ZipFile(file)
    file.most = CHUNK_BYTES
    return archive


def _read_npy_header(
    name: str, start: io.BytesIO
) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Read shape, whether the first axis is the fastest, and type from the start of an .npy file.

    NumPy reads all of a header before it compares the length with a limit: so the start is bounded.
    """
    try:
        version = read_magic(start)
    except ValueError:
        version = (0, 0)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise BrokenArchive(f"array {name!r}: expected an .npy file of version 1 to 3, got another")
    read = read_array_header_1_0 if version == (1, 0) else read_array_header_2_0
    try:
        shape, fortran, dtype = read(start, max_header_size=HEADER_BYTES)
    except MALFORMED_LITERAL as error:
        if not start.read(1):
            raise BrokenArchive(
                f"array {name!r}: expected a header of at most {HEADER_BYTES:,} bytes, got a "
                "longer or truncated one"
            ) from error
        raise BadArrays(
            f"array {name!r}: expected one plain array of numbers, got something else: "
            f"{error!s:.80}"
        ) from error
    _check_shape(name, shape)
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise _bad_type(name, dtype.str)
    return shape, fortran, dtype


def _fill(target: memoryview, pieces: Iterable[bytes]) -> None:
    """Fill a view of bytes; raises ValueError where there are more or fewer."""
    filled = 0
    for piece in pieces:
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
    if filled < len(target):
        raise ValueError(f"expected {len(target):,} bytes, got {filled:,}")


def _check_name(name: str) -> None:
    if name not in NAMES:
        expected = ", ".join(NAMES)
        raise BadArrays(f"array {name[:64]!r}: expected one of {expected}, got an unknown name")


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) > 8 or min(shape, default=1) < 1:
        raise BadArrays(
            f"array {name!r}: expected at most 8 axes, none empty, got shape {list(shape[:9])}"
        )


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise TooLarge(f"expected arrays of at most {max_bytes:,} bytes together, got {size:,}")


def _bad_type(name: str, got: str) -> BadArrays:
    return BadArrays(
        f"array {name!r}: expected numbers of float16, bfloat16 (in safetensors only), float32 or "
        f"float64, got {got}"
    )


@contextmanager
def _expect_sound(kind: str) -> Iterator[None]:
    """Turn what libraries raise for a malformed file into BrokenArchive."""
    try:
        yield
    except RequestError:
        raise
    except MALFORMED as error:
        if is_out_of_memory(error):
            raise
        raise BrokenArchive(f"expected a sound {kind} file, got a broken one") from error


class _BoundedReads(MemoryFile):
    """A file of which zipfile never reads much at once, whatever length a directory declares."""

    most = DIRECTORY_BYTES

    def read(self, size: int = -1, /) -> bytes:
        if min(size, self.left) > self.most:
            raise BrokenArchive(
                f"expected an npz file that ends with a directory of at most {self.most:,} bytes, "
                "as four arrays have, got another, or a truncated file"
            )
        return super().read(size) or b""
