"""Sound files -> damaged ones, as disks, networks and attackers damage them.

Every file is named by its seed, so that one that breaks something can be made again.
"""

import gzip
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from zipfile import ZIP_STORED

import numpy as np
from safetensors.numpy import save

from tests.support.dicom_files import as_dicom, as_enhanced, zipped
from tests.support.nifti_files import ByteOrder, nifti
from tests.support.scan_files import as_metaimage, as_mgh, as_nrrd
from tests.support.vote_archives import npz

INTEGERS: Final = (0, 1, -1, 2, 7, 127, 255, 4096, 32767, -32768, 65535, 1 << 31, (1 << 32) - 1)
FLOATS: Final = (0.0, 1.0, -1.0, 1e-38, 3e38, -3e38, 1e3, float("nan"), float("inf"), -float("inf"))
KINDS: Final[tuple[tuple[str, Literal[1, 2], ByteOrder, bool], ...]] = (
    ("uint8", 1, "<", True),
    ("int16", 1, "<", False),
    ("int16", 1, ">", True),
    ("uint16", 2, "<", False),
    ("int32", 2, ">", True),
    ("float32", 1, "<", True),
    ("float64", 1, "<", False),
)
"""Type of the voxels, version of NIfTI, byte order, and whether it is zipped."""

HEADER_BYTES: Final = 352
"""Of NIfTI-1; most damage that means anything is done there."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged file.

    Attributes:
        seed: Makes it again.
        content: Its bytes.
    """

    seed: int
    content: bytes


def sound_scans() -> tuple[bytes, ...]:
    """Make small scans of all formats and kinds: byte orders, many types, 4D, zipped, a series."""
    random = np.random.default_rng(3)
    shape = (22, 18, 20)
    files = [
        nifti(random.integers(0, 100, shape).astype(dtype), version, order, zipped)
        for dtype, version, order, zipped in KINDS
    ]
    voxels = random.integers(0, 9, (*shape, 2)).astype("int16")
    files += [
        nifti(voxels, zipped=True),
        as_nrrd(voxels[..., 0]),
        as_nrrd(voxels[..., 0], encoding="gzip"),
        as_metaimage(voxels[..., 0]),
        as_metaimage(voxels, zipped=True),
        as_mgh(voxels, zipped=True),
        as_enhanced(voxels[..., 0]),
        zipped(as_dicom(voxels[..., 0]), ZIP_STORED),
        zipped(as_dicom(voxels[..., 0])),
    ]
    return tuple(files)


def sound_archives() -> tuple[bytes, ...]:
    """Make small outputs of a network, as npz and safetensors."""
    random = np.random.default_rng(4)
    arrays = {
        "probs": random.random((9, 8, 7, 3)).astype(np.float32),
        "offsets": random.normal(0, 2, (9, 8, 7, 9)).astype(np.float32),
        "affine": np.diag([1.0, 2.0, 0.5, 1.0]),
    }
    return npz(arrays, compressed=False), npz(arrays), save(arrays)


def mutate(files: Sequence[bytes], seed: int, head: int = HEADER_BYTES) -> Mutant:
    """Damage one of some files.

    Args:
        files: Sound ones.
        seed: Says which, where and how.
        head: Bytes at the start that are damaged more often than others.

    Returns:
        The damaged file.
    """
    random = np.random.default_rng(seed)
    content = files[int(random.integers(len(files)))]
    zipped = content[:2] == b"\x1f\x8b"
    inside = zipped and random.random() < 0.7
    data = bytearray(gzip.decompress(content) if inside else content)
    for _ in range(int(random.integers(1, 4))):
        DAMAGES[random.integers(len(DAMAGES))](data, random, head)
    return Mutant(seed, gzip.compress(bytes(data), 1) if inside else bytes(data))


def _offset(data: bytearray, random: np.random.Generator, head: int) -> int:
    end = min(head, len(data)) if random.random() < 0.8 else len(data)
    return int(random.integers(max(1, end)))


def _flip_bits(data: bytearray, random: np.random.Generator, head: int) -> None:
    for _ in range(int(random.integers(1, 9))):
        if data:
            data[_offset(data, random, head)] ^= 1 << int(random.integers(8))


def _put_number(data: bytearray, random: np.random.Generator, head: int) -> None:
    at = _offset(data, random, head) & ~1
    if random.random() < 0.5:
        value = INTEGERS[random.integers(len(INTEGERS))]
        size = (2, 4, 8)[random.integers(3)]
        packed = (value % (1 << 8 * size)).to_bytes(size, "little")
    else:
        packed = struct.pack("<f", FLOATS[random.integers(len(FLOATS))])
    data[at : at + len(packed)] = packed


def _cut(data: bytearray, random: np.random.Generator, head: int) -> None:
    del data[_offset(data, random, head) :]


def _insert(data: bytearray, random: np.random.Generator, head: int) -> None:
    at = _offset(data, random, head)
    data[at:at] = random.bytes(int(random.integers(1, 64)))


def _repeat(data: bytearray, random: np.random.Generator, head: int) -> None:
    at = _offset(data, random, head)
    size = int(random.integers(1, 4096))
    data[at:at] = data[at : at + size]


def _blank(data: bytearray, random: np.random.Generator, head: int) -> None:
    at = _offset(data, random, head)
    size = min(int(random.integers(1, 256)), len(data) - at)
    data[at : at + size] = bytes([int(random.choice([0, 255]))]) * size


DAMAGES: Final[tuple[Callable[[bytearray, np.random.Generator, int], None], ...]] = (
    _flip_bits,
    _put_number,
    _put_number,
    _cut,
    _insert,
    _repeat,
    _blank,
)
