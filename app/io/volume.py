"""bytes -> Volume: a NIfTI file, plain or gzip, as a 3D array with its place in space.

The kind of file is told by its bytes, never by a name. The header comes first and says how large
the file is: what is over a limit or no 3D scan is refused before its voxels are inflated.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.errors import BadGeometry, BadParameter, BadVoxels, BrokenVolume, TooLarge
from app.geometry import Affine, transform
from app.io.gzip_stream import Content, FileStream
from app.io.nifti_header import Header, by_axis, corners, read_header

HEAD_BYTES: Final = 64 << 10
"""``check_header`` needs no more of a body, unless its gzip header holds an absurdly long name."""

TRAILING_BYTES: Final = 64 << 10
"""Ignored after the voxels: tapes, archives and disks pad files to blocks of up to 64 KiB."""

REACH_MM: Final = 1e4
"""No corner of a scan lies farther from the origin; lengths in micron that claim to be mm do."""

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
"""Networks read float32, so a larger value is as good as infinite."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A scan as it was uploaded.

    Attributes:
        voxels: Scaled values (slope and intercept applied), real, (i j k), of a type that torch
            takes, writable, native byte order, i fastest; masked voxels hold the smallest
            finite value.
        affine: Voxel index -> mm, RAS.
        masked: How many voxels were NaN, infinite or beyond float32.
        digest: BLAKE3 of the uncompressed file, hex; all frames of a file share it.
        warnings: What a careful reader should know, in sentences without patient data.
    """

    voxels: np.ndarray
    affine: Affine
    masked: int
    digest: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    """What a volume may need.

    Attributes:
        inflated_bytes: Size of the file once inflated.
        voxels: Voxels of the 3D volume.
        axis: Voxels along one axis.
    """

    inflated_bytes: int = 4 << 30
    voxels: int = 768**3
    axis: int = 4096


def read_volume(
    content: Content,
    limits: VolumeLimits | None = None,
    frame: int | None = None,
) -> Volume:
    """Read an uploaded NIfTI file.

    Args:
        content: The whole file, plain or gzip.
        limits: What the volume may need; the defaults if None.
        frame: Which 3D volume of a file that holds several, from 0, the 4th axis counting fastest.

    Returns:
        The scan, in memory of its own.

    Raises:
        NotAVolume: The bytes are something else.
        BrokenVolume: Truncated, corrupt, or longer than the header declares.
        TooLarge: Over a limit.
        BadGeometry: No clear reading in 3D space, or several frames and none chosen.
        BadVoxels: Complex, RGB, or nothing finite.
        BadParameter: There is no such frame.
    """
    stream = FileStream(content)
    header = read_header(stream)
    chosen = _choose(header, limits or VolumeLimits(), frame)
    stored, warnings = _read_frame(stream, header, chosen)
    voxels = _scale(stored, header)
    masked, constant = _mask(voxels)
    if masked:
        warnings.append(
            f"{masked:,} of {voxels.size:,} voxels are not finite; "
            "the smallest finite value was used for them"
        )
    if constant:
        warnings.append("all voxels have the same value")
    return Volume(
        voxels=voxels,
        affine=header.affine,
        masked=masked,
        digest=stream.hexdigest(),
        warnings=(*header.warnings, *warnings),
    )


def check_header(
    content: Content,
    limits: VolumeLimits | None = None,
    frame: int | None = None,
) -> Header:
    """Check the header alone, to refuse a file before the rest of its body is received.

    Args:
        content: The file, or at least its first ``HEAD_BYTES``.
        limits: As for ``read_volume``.
        frame: As for ``read_volume``.

    Returns:
        What the header declares; ``file_bytes`` and ``shape`` foretell the memory needed.

    Raises:
        RequestError: As ``read_volume`` does, where the header is enough to tell.
    """
    header = read_header(FileStream(content))
    _choose(header, limits or VolumeLimits(), frame)
    return header


def _choose(header: Header, limits: VolumeLimits, frame: int | None) -> int:
    """Check size, extent and number of frames, in this order, and return the frame to read."""
    needs = (
        ("axis", "voxels along an axis", limits.axis, max(header.shape)),
        ("voxels", "voxels", limits.voxels, math.prod(header.shape)),
        ("inflated_bytes", "bytes once inflated", limits.inflated_bytes, header.file_bytes),
    )
    for name, what, limit, need in needs:
        if need > limit:
            raise TooLarge(f"expected at most {limit:,} {what} (limit {name}), got {need:,}")
    reach = np.abs(transform(header.affine, corners(header.shape))).max()
    if reach > REACH_MM:
        raise BadGeometry(
            f"expected a scan within {REACH_MM:g} mm of the origin, got one that reaches "
            f"{reach:g} mm; is its unit of length right?"
        )
    if frame is None and header.frames > 1:
        raise BadGeometry(
            f"expected one 3D volume, got {header.frames} frames "
            f"({by_axis(header.shape + header.frame_shape)}); choose one with frame=, from 0"
        )
    if frame is not None and not 0 <= frame < header.frames:
        raise BadParameter(f"expected frame from 0 to {header.frames - 1}, got {frame}")
    return frame or 0


def _read_frame(stream: FileStream, header: Header, frame: int) -> tuple[np.ndarray, list[str]]:
    """Read a file to its end, keep the bytes of one frame, and warn of bytes after the voxels."""
    if stream.most_bytes < header.file_bytes:
        # Refused before memory is reserved for what a header only claims.
        raise BrokenVolume(
            f"expected {header.file_bytes:,} bytes, as the header declares, "
            f"got a body that holds {stream.most_bytes:,} at most"
        )
    stored = np.empty(header.frame_bytes, dtype=np.uint8)
    stream.skip(header.offset - stream.position + frame * header.frame_bytes)
    stream.fill(stored.data)
    stream.skip(header.file_bytes - stream.position)
    trailing = len(stream.read(TRAILING_BYTES + 1))
    if trailing > TRAILING_BYTES:
        raise BrokenVolume(
            f"expected {header.file_bytes:,} bytes, as the header declares, and at most "
            f"{TRAILING_BYTES:,} of padding, got more"
        )
    return stored, [f"{trailing:,} bytes after the voxels were ignored"] if trailing else []


def _scale(stored: np.ndarray, header: Header) -> np.ndarray:
    """Turn stored bytes into values, in place unless there is a slope or intercept to apply.

    Scaled values are float32, or float64 where float32 does not hold the stored type exactly.
    """
    voxels = stored.view(header.dtype).reshape(header.shape, order="F")
    if not header.dtype.isnative:
        voxels = voxels.byteswap(inplace=True).view(header.dtype.newbyteorder("="))
    if header.dtype.itemsize > 8:
        voxels = voxels.astype(np.float64)
    if (header.slope, header.intercept) == (1.0, 0.0):
        return voxels
    with np.errstate(all="ignore"):  # What overflows is masked afterwards.
        scaled = np.multiply(voxels, header.slope, dtype=np.result_type(voxels, np.float32))
        scaled += header.intercept
    return np.asarray(scaled)


@np.errstate(invalid="ignore")
def _mask(voxels: np.ndarray) -> tuple[int, bool]:
    """Fill voxels that are not finite with the smallest that is, in place.

    Returns:
        How many there were, and whether the volume is constant.
    """
    low, high = voxels.min(), voxels.max()
    # Two reductions, and no array of flags, where all is well. NaN fails the comparison.
    if voxels.dtype.kind != "f" or -FLOAT32_MAX <= low <= high <= FLOAT32_MAX:
        return 0, bool(low == high)
    finite = np.abs(voxels) <= FLOAT32_MAX
    count = int(np.count_nonzero(finite))
    if count == 0:
        raise BadVoxels(f"expected finite voxels, got {voxels.size:,} that are not")
    low = voxels.min(where=finite, initial=np.inf)
    high = voxels.max(where=finite, initial=-np.inf)
    np.copyto(voxels, low, where=~finite)
    return voxels.size - count, bool(low == high)
