"""bytes -> Volume: a file of any format that is read, as a 3D array with its affine.

The kind of file is told by its bytes, never by a name. The header declares how large the file is,
so files over a limit, and those that hold no 3D scan, are refused before their voxels are inflated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from app.errors import (
    BadGeometry,
    BadParameter,
    BadVoxels,
    BrokenVolume,
    NotAVolume,
    RequestError,
    TooLarge,
)
from app.geometry import Affine, corners, transform
from app.io.dicom import Series, StoredFile, check_series, find_series, is_dicom, list_files
from app.io.gzip_stream import CHUNK_BYTES, Content, FileStream
from app.io.header import Header, by_axis
from app.io.metaimage_header import METAIMAGE_MAGIC, read_metaimage_header
from app.io.mgh_header import MGH_MAGIC, read_mgh_header
from app.io.nifti_header import read_nifti_header
from app.io.nrrd_header import NRRD_MAGIC, read_nrrd_header
from app.settings import Settings

FILES_TRIED: Final = 8
"""Of an archive without DICOM images, to tell whether it holds other scans."""

HEAD_BYTES: Final = 64 << 10
"""All that ``check_header`` needs, but for absurdly long names or many empty members in gzip."""

MAX_TRAILING_BYTES: Final = 64 << 10
"""Ignored after the voxels, because tapes and archives pad files to blocks of up to 64 KiB."""

MAX_REACH_MM: Final = 1e4
"""Largest distance of a corner of a scan from the origin; microns declared as mm exceed it."""

SCAN_SUFFIXES: Final = (
    ".nii", ".nii.gz", ".hdr", ".hdr.gz", ".nrrd", ".nhdr", ".mha", ".mhd", ".mgh", ".mgz",
    ".mnc", ".HEAD", ".PAR", ".zip",
)  # fmt: skip
"""Of files that are taken for scans where a folder is given."""

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
"""Larger values count as infinite, because networks compute in float32."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A scan as it was uploaded.

    Attributes:
        voxels: Scaled values (slope and intercept applied), real, (i j k), of a type that torch
            takes, writable, native byte order, i fastest; masked voxels hold the smallest
            finite value.
        affine: Voxel index -> mm, RAS.
        digest: BLAKE3 of the uncompressed file, hex, or of the digests of a DICOM series' files;
            all frames of a file share it. Empty of a scan that was not read from a file.
        warnings: What a careful reader should know, in sentences without patient data.
    """

    voxels: np.ndarray
    affine: Affine
    digest: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    """Limits on the size of a volume.

    Attributes:
        inflated_bytes: Size of the uncompressed file.
        voxels: Voxels of the 3D volume.
        axis: Voxels along one axis.
    """

    inflated_bytes: int = 4 << 30
    voxels: int = 768**3
    axis: int = 4096

    @classmethod
    def of(cls, settings: Settings) -> "VolumeLimits":
        """Take the limits of the settings."""
        return cls(settings.max_inflated_bytes, settings.max_voxels, settings.max_axis)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which scan of a file that holds several.

    Attributes:
        frame: Which 3D volume of a 4D file, from 0; the 4th axis varies fastest.
        series: Which series of a DICOM archive, from 0, those of most images first.
    """

    frame: int | None = None
    series: int | None = None


ONLY: Final = Selection()
"""The only scan of a file."""


def read_volume(
    content: Content,
    limits: VolumeLimits | None = None,
    selection: Selection = ONLY,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Volume:
    """Read an uploaded scan.

    Args:
        content: The whole file.
        limits: Limits on its size; the defaults if None.
        selection: Which scan of a file that holds several.
        check_cancelled: Called for every MiB; raises once nobody waits for the scan any more.

    Returns:
        The scan, in its own memory.

    Raises:
        NotAVolume: The bytes are something else.
        BrokenVolume: Truncated, corrupt, or longer than the header declares.
        TooLarge: Over a limit.
        BadGeometry: No clear reading in 3D space, or several frames and none chosen.
        BadVoxels: Complex, RGB, or nothing finite.
        BadParameter: There is no such frame or series.
    """
    limits = limits or VolumeLimits()
    if is_dicom(content):
        scan = _find_series(content, limits, selection, check_cancelled)
        _check_limits(scan.header, limits, selection.frame)
        stored, digest = scan.read_voxels(check_cancelled)
        return _make_volume(scan.header, stored, digest, [])
    check_series(selection.series, 1)
    stream = FileStream(content, check_cancelled)
    header = choose_reader(stream)(stream)
    index = _check_limits(header, limits, selection.frame)
    stored, warnings = _read_frame(stream, header, index)
    return _make_volume(header, stored, stream.hexdigest(), warnings)


def check_header(
    content: Content,
    limits: VolumeLimits | None = None,
    selection: Selection = ONLY,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Header:
    """Check the header only, to refuse a file before the rest of it is received.

    The content is at least the first ``HEAD_BYTES`` of the file, or all of it where ``is_dicom``;
    all else is as for ``read_volume``, errors included, as far as the header tells.
    """
    limits = limits or VolumeLimits()
    if is_dicom(content):
        header = _find_series(content, limits, selection, check_cancelled).header
        _check_limits(header, limits, selection.frame)
    else:
        check_series(selection.series, 1)
        # No more of a file that is whole: its header may lie behind millions of empty members.
        stream = FileStream(content[:HEAD_BYTES])
        header = choose_reader(stream)(stream)
        _check_limits(header, limits, selection.frame)
        if len(content) < HEAD_BYTES:  # It is the whole file.
            _check_length(stream, header)
    return header


def choose_reader(stream: FileStream) -> Callable[[FileStream], Header]:
    """Return what reads a header of the format that the first bytes of a file tell."""
    start = stream.peek(max(map(len, (NRRD_MAGIC, MGH_MAGIC, *METAIMAGE_MAGIC))))
    if start.startswith(NRRD_MAGIC):
        return read_nrrd_header
    if start.startswith(MGH_MAGIC):
        return read_mgh_header
    return read_metaimage_header if start.startswith(METAIMAGE_MAGIC) else read_nifti_header


def list_shown(folder: Path) -> list[Path]:
    """List what a folder shows, sorted. Hidden is what macOS puts beside x as ._x on some disks."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def name_in_utf8(name: str) -> str:
    r"""Return the name of a file as UTF-8 has it: a byte of another encoding becomes ``\xe9``.

    A carriage return becomes ``\r``: in a table it would be the end of a row.
    """
    name = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return name.replace("\r", r"\r")


def scan_stem(name: str) -> str:
    """Return the name of a scan's file without its suffixes."""
    for suffix in sorted((*SCAN_SUFFIXES, ".gz", ".dcm"), key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _find_series(
    content: Content,
    limits: VolumeLimits,
    selection: Selection,
    check_cancelled: Callable[[], None],
) -> Series:
    """Find the scan in DICOM files; where there are scans of other formats, say where these go."""
    try:
        return find_series(content, limits.inflated_bytes, selection.series, check_cancelled)
    except NotAVolume as error:
        files = list_files(content, limits.inflated_bytes)[:FILES_TRIED]
        if not any(_is_scan(file, check_cancelled) for file in files):
            raise
        message = f"{error}; an archive of several scans of other formats goes to POST /v1/jobs"
        raise NotAVolume(message) from None


def _is_scan(file: StoredFile, check_cancelled: Callable[[], None]) -> bool:
    """Say whether a file of an archive begins as a scan of another format than DICOM."""
    try:
        stream = FileStream(file.open(check_cancelled).read(HEAD_BYTES))
        choose_reader(stream)(stream)
    except RequestError:
        return False
    return True


def _check_length(stream: FileStream, header: Header) -> None:
    """Refuse a file that is too short for its voxels, before memory is allocated for them."""
    if stream.max_bytes < header.file_bytes:
        raise BrokenVolume(
            f"expected {header.file_bytes:,} bytes, as the header declares, "
            f"got a body that holds {stream.max_bytes:,} at most"
        )


def _check_limits(header: Header, limits: VolumeLimits, frame: int | None) -> int:
    """Check size, distance from the origin and frames; return the index of the frame to read."""
    needs = (
        ("AXIS", "voxels along an axis", limits.axis, max(header.shape)),
        ("VOXELS", "voxels", limits.voxels, math.prod(header.shape)),
        ("INFLATED_BYTES", "bytes once inflated", limits.inflated_bytes, header.file_bytes),
    )
    for name, what, limit, need in needs:
        if need > limit:
            raise TooLarge(
                f"expected at most {limit:,} {what}, got {need:,}; the operator's limit is "
                f"LANDMARKD_MAX_{name}"
            )
    reach = np.abs(transform(header.affine, corners(header.shape))).max()
    if reach > MAX_REACH_MM:
        raise BadGeometry(
            f"expected a scan within {MAX_REACH_MM:g} mm of the origin, got one that reaches "
            f"{reach:g} mm; is its unit of length right?"
        )
    if frame is None and header.frames > 1:
        raise BadGeometry(
            f"expected one 3D volume, got {header.frames} frames "
            f"({by_axis(header.shape + header.frame_shape)}); choose a frame, from 0"
        )
    if frame is not None and not 0 <= frame < header.frames:
        raise BadParameter(f"expected frame from 0 to {header.frames - 1}, got {frame}")
    return frame or 0


def _read_frame(stream: FileStream, header: Header, frame: int) -> tuple[np.ndarray, list[str]]:
    """Read a file to its end; return the bytes of one frame, and warnings about trailing bytes."""
    _check_length(stream, header)
    stream.skip(header.offset - stream.position)
    if header.interleaved:
        stored = _pick_frame(stream, header, frame)
    else:
        stored = np.empty(header.frame_bytes, dtype=np.uint8)
        stream.skip(frame * header.frame_bytes)
        stream.fill(stored.data)
    stream.skip(header.file_bytes - stream.position)
    most = header.footer_bytes or MAX_TRAILING_BYTES
    trailing = len(stream.read(most + 1))
    if trailing > most:
        raise BrokenVolume(
            f"expected {header.file_bytes:,} bytes, as the header declares, and at most "
            f"{most:,} behind the voxels, got more"
        )
    ignored = trailing and not header.footer_bytes
    return stored, [f"{trailing:,} bytes after the voxels were ignored"] if ignored else []


def _pick_frame(stream: FileStream, header: Header, frame: int) -> np.ndarray:
    """Read one of frames whose voxels alternate, a piece of all of them at a time."""
    size = header.dtype.itemsize
    stored = np.empty((math.prod(header.shape), size), dtype=np.uint8)
    step = max(1, CHUNK_BYTES // (header.frames * size))
    piece = np.empty((step, header.frames, size), dtype=np.uint8)
    for start in range(0, len(stored), step):
        part = piece[: len(stored) - start]
        stream.fill(part.reshape(-1).data)
        stored[start : start + step] = part[:, frame]
    return stored.reshape(-1)


def _make_volume(header: Header, stored: np.ndarray, digest: str, warnings: list[str]) -> Volume:
    """Make a volume of the stored bytes of its voxels, which are used up."""
    voxels = _scale(stored, header)
    masked, constant = _mask(voxels)
    flat = [f"the scan is a single slice ({by_axis(header.shape)} voxels)"]
    warnings = [*header.warnings, *(flat if 1 in header.shape else []), *warnings]
    if masked:
        warnings.append(
            f"{masked:,} of {voxels.size:,} voxels are not finite; "
            "the smallest finite value was used for them"
        )
    if constant:
        warnings.append("all voxels have the same value")
    return Volume(voxels, header.affine, digest, tuple(warnings))


def _scale(stored: np.ndarray, header: Header) -> np.ndarray:
    """Convert stored bytes to values, in place unless there is a slope or intercept to apply."""
    voxels = stored.view(header.dtype).reshape(header.shape, order="F")
    if not header.dtype.isnative:
        voxels = voxels.byteswap(inplace=True).view(header.dtype.newbyteorder("="))
    if header.dtype.itemsize > 8:
        voxels = voxels.astype(np.float64)
    if not header.is_scaled:
        return voxels
    with np.errstate(all="ignore"):  # Overflows are masked afterwards.
        scaled = np.multiply(voxels, header.slope, dtype=header.value_dtype)
        scaled += header.intercept
    return np.asarray(scaled)


@np.errstate(invalid="ignore")
def _mask(voxels: np.ndarray) -> tuple[int, bool]:
    """Replace voxels that are not finite by the smallest finite value, in place.

    Returns:
        Their number, and whether the volume is constant.
    """
    low, high = voxels.min(), voxels.max()
    # Usually two reductions are enough, without a mask. NaN fails the comparison.
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
