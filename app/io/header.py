"""Header: what a file declares about its voxels, in whatever format, and the checks all share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from app.errors import BadGeometry, BrokenVolume
from app.geometry import Affine, spacing_of
from app.io.gzip_stream import FileStream

MIN_SPACING_MM: Final = 9.99e-6
"""10 nm, of which float32 makes a little less: finer than nano-CT."""

MAX_SPACING_MM: Final = 1e3
"""1 m: coarser than any scanner."""

MIN_DETERMINANT: Final = 1e-3
"""Of the unit vectors along the axes; below this they lie almost in one plane."""

MM_PER_UNIT: Final = {"": 1.0, "um": 1e-3, "mm": 1.0, "cm": 10.0, "m": 1e3}
"""By the unit of length that a file names; without one, mm are assumed."""

UNIT_WARNINGS: Final = {
    "": "the file does not name its unit of length; millimetres were assumed",
    "um": "the file measures in microns; they were converted to millimetres",
    "cm": "the file measures in centimetres; they were converted to millimetres",
    "m": "the file measures in metres; they were converted to millimetres",
}

JOIN_HINT: Final = "give both to landmarkd detect or the page, or send one file that holds both"
"""What to do with a header of voxels in another file."""

TEXT_BYTES: Final = 64 << 10
"""Of a header that is text: several times what the longest honest ones take."""

TEXT_LINES: Final = 2048
"""Likewise: each takes a microsecond of the event loop, and 64 KiB may hold tens of thousands."""

NUMBER: Final = frozenset("0123456789+-.eE")
"""All that the numbers of such headers are written with; ``float`` accepts more."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file declares about its voxels.

    Attributes:
        shape: Voxels along i, j and k.
        frame_shape: Lengths of the axes after those; empty if there are none.
        dtype: Type of the stored voxels, in their byte order.
        offset: Position of the first voxel in the uncompressed file, in bytes.
        affine: Voxel index -> mm, RAS.
        slope: A value is stored voxel * slope + intercept.
        intercept: Likewise.
        warnings: What a careful reader should know, in sentences without patient data.
        interleaved: Whether the values of one voxel in all frames lie side by side; otherwise one
            frame lies behind the other.
        footer_bytes: What the format may have behind the voxels, at most.
    """

    shape: tuple[int, int, int]
    frame_shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    offset: int
    affine: Affine
    slope: float = 1.0
    intercept: float = 0.0
    warnings: tuple[str, ...] = ()
    interleaved: bool = False
    footer_bytes: int = 0

    @property
    def frames(self) -> int:
        """Number of 3D volumes in the file."""
        return math.prod(self.frame_shape)

    @property
    def is_scaled(self) -> bool:
        """Whether there is a slope or intercept to apply."""
        return (self.slope, self.intercept) != (1.0, 0.0)

    @property
    def value_dtype(self) -> np.dtype[np.generic]:
        """Type of the values: as stored, or float64 instead of a longer type.

        Scaled values are float32, or float64 if float32 does not represent the type exactly.
        """
        dtype = self.dtype if self.dtype.itemsize <= 8 else np.dtype(np.float64)
        return np.result_type(dtype, np.float32) if self.is_scaled else dtype

    @property
    def frame_bytes(self) -> int:
        """Bytes of one stored 3D volume."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Size of the uncompressed file up to the end of its last voxel."""
        return self.offset + self.frames * self.frame_bytes


def by_axis(lengths: Sequence[float]) -> str:
    """Format lengths along axes, for example ``64 x 64 x 21``."""
    return " x ".join(f"{length:g}" if length % 1 else str(int(length)) for length in lengths)


def shape_of(lengths: Sequence[int]) -> tuple[int, int, int]:
    """Return the first three lengths of axes.

    Raises:
        BadGeometry: There are fewer, or one of all the axes is empty.
    """
    if len(lengths) < 3 or min(lengths) < 1:
        raise BadGeometry(f"expected 3 axes or more, none empty, got {by_axis(lengths)}")
    return lengths[0], lengths[1], lengths[2]


def check_spacing(affine: Affine) -> None:
    """Check the axes of a finite affine: their lengths, and that they are no plane or line.

    Raises:
        BadGeometry: They are not those of a scan.
    """
    spacing = spacing_of(affine)
    if not MIN_SPACING_MM <= spacing.min() <= spacing.max() <= MAX_SPACING_MM:
        raise BadGeometry(
            f"expected a spacing from {MIN_SPACING_MM:g} to {MAX_SPACING_MM:g} mm, "
            f"got {' x '.join(f'{length:g}' for length in spacing)} mm"
        )
    volume = abs(np.linalg.det(affine[:3, :3] / spacing))
    if volume < MIN_DETERMINANT:
        raise BadGeometry(f"expected three independent axes, got a determinant of {volume:.1g}")


@np.errstate(all="ignore")  # Overflows fail the checks.
def make_affine(world: Affine, columns: Float64[np.ndarray, "4 3"]) -> Affine:
    """Make a checked affine.

    Args:
        world: Maps mm of the file's world to mm, RAS.
        columns: The steps from one voxel to the next along i, j and k, and the position of the
            first voxel, in mm of the file's world.

    Returns:
        Voxel index -> mm, RAS.

    Raises:
        BadGeometry: It is not finite, or not one of a scan.
    """
    affine = np.eye(4)
    affine[:3] = columns.T
    affine = world @ affine
    if not np.isfinite(affine).all():
        raise BadGeometry("expected a finite affine, got one that is not")
    check_spacing(affine)
    return affine


def read_lines(stream: FileStream, is_last: Callable[[str], bool]) -> list[str]:
    """Read a header that is text.

    Args:
        stream: At its first byte; afterwards at the first byte after the header.
        is_last: Says of a line whether the header ends with it.

    Returns:
        The lines, without line ends.

    Raises:
        BrokenVolume: The header does not end, or is too long.
    """
    lines: list[str] = []
    text, start, size = b"", 0, 1024
    while size <= TEXT_BYTES:
        more = stream.peek(size)
        if len(more) == len(text):
            raise BrokenVolume(
                f"expected a whole header, got one cut short after {len(text)} bytes"
            )
        text = more
        while (end := text.find(b"\n", start)) >= 0:
            line = _decode(text[start:end]).rstrip("\r")
            start = end + 1
            lines.append(line)
            if is_last(line):
                stream.read(start)
                return lines
            if len(lines) >= TEXT_LINES:
                raise BrokenVolume(
                    f"expected a header of at most {TEXT_LINES:,} lines, got a longer one"
                )
        size *= 2
    raise BrokenVolume(f"expected a header of at most {TEXT_BYTES:,} bytes, got a longer one")


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("latin-1")


def parse_numbers(text: str, count: int, field: str) -> list[float]:
    """Parse numbers separated by spaces.

    Raises:
        BrokenVolume: They are not numbers, or not as many as expected.
    """
    words = text.split(maxsplit=count)
    try:
        numbers = [float(word) for word in words if NUMBER.issuperset(word)]
    except ValueError:
        numbers = []
    if len(numbers) != count or len(words) != count:
        raise BrokenVolume(f"expected {count} numbers in {field}, got something else")
    return numbers


def parse_lengths(text: str, field: str) -> list[int]:
    """Parse the lengths of axes, separated by spaces.

    Raises:
        BrokenVolume: They are not whole numbers of at most 12 digits, or more than 16.
    """
    words = text.split(maxsplit=15)
    if not all(w.isascii() and w.isdigit() and len(w) <= 12 for w in words):
        raise BrokenVolume(f"expected up to 16 whole numbers in {field}, got something else")
    return [int(word) for word in words]
