"""Head -> Image: the planes of a DICOM file in space, and the type of its pixels.

Attributes are those of PS3.3: C.7.6.2 (planes), C.7.6.3 (pixels), C.7.6.16 (multi-frame functional
groups, which say for each frame, or for all, what other files say once).
"""

import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.errors import BadGeometry, BadVoxels, BrokenVolume, RequestError, show_controls
from app.io.dicom.archive import StoredFile
from app.io.dicom.elements import (
    MODALITY_LUT,
    PER_FRAME,
    PIXEL_MEASURES,
    PIXEL_VALUES,
    PLAIN,
    PLANE_ORIENTATION,
    PLANE_POSITION,
    SHARED,
    Dataset,
    Head,
    Tag,
    read_head,
)
from app.io.header import parse_numbers

MODALITIES: Final = frozenset(
    ("CT", "MR", "PT", "NM", "US", "XA", "CR", "DX", "MG", "SC", "OT", "RTDOSE", "SEG", "OPT")
)
"""Named in errors; anything else may be a text of any kind."""

SERIES_NUMBER: Final = re.compile(rb"[+-]?[0-9]{1,6}")
"""Likewise; more digits may be a date or an identity."""

TOLD_CHARACTERS: Final = 64
"""Of a SeriesDescription; DICOM allows no more."""

CHARACTER_SETS: Final = re.compile("ISO_IR 1(01|09|10|26|27|38|44|48|66)|GB18030|GBK")
"""Those that Python knows by these names, without Latin-1, as which many declare UTF-8."""

MOSAICS: Final = frozenset((b"MOSAIC", b"VFRAME"))
"""What Siemens and United Imaging write into ImageType where slices lie side by side."""

GROUPS: Final = {
    Tag.ImagePositionPatient: PLANE_POSITION,
    Tag.ImageOrientationPatient: PLANE_ORIENTATION,
    Tag.PixelSpacing: PIXEL_MEASURES,
    Tag.SliceThickness: PIXEL_MEASURES,
    Tag.RescaleSlope: PIXEL_VALUES,
    Tag.RescaleIntercept: PIXEL_VALUES,
}
"""The functional groups that hold what stands on its own in files of one frame."""


@dataclass(frozen=True, slots=True)
class PixelType:
    """How the pixels of a file are stored.

    Attributes:
        syntax: The UID of the transfer syntax.
        rows: Of an image.
        columns: Of an image.
        dtype: Of a pixel once it is decompressed, in its byte order.
        bits: Of a pixel that count, the lowest ones.
    """

    syntax: str
    rows: int
    columns: int
    dtype: np.dtype[np.generic]
    bits: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of one image that is not compressed."""
        return self.rows * self.columns * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plane:
    """One image, and where it lies.

    Attributes:
        file: Index of its file.
        frame: Index in that file.
        pixels: How it is stored.
        orientation: Directions along a row and along a column, LPS.
        spacing: Between rows and between columns, in mm.
        position: Centre of the first pixel, in mm, LPS.
        thickness: In mm; None if the file does not say, or not as a number.
        scale: Slope and intercept: a value is stored pixel * slope + intercept.
    """

    file: int
    frame: int
    pixels: PixelType
    orientation: tuple[float, ...]
    spacing: tuple[float, ...]
    position: tuple[float, ...]
    thickness: float | None
    scale: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Uids:
    """What identifies a file and what it belongs to, as it stands there; empty where it does not.

    Only a report that refers to the very images shows them.
    """

    sop_class: str
    sop_instance: str
    study: str
    series: str
    frame_of_reference: str


@dataclass(frozen=True, slots=True)
class Image:
    """The images of one file.

    Attributes:
        uids: What identifies it.
        kind: The modality, such as CT, or ``other`` if it is none of those known; and the number of
            the series, which tells it from others like it, if there is one.
        told: How its scanner calls and makes the series: SeriesDescription, as it stands there, and
            the times of MRI; empty where there are none.
        offset: Position of the pixels in the file, in bytes.
        length: Bytes of the pixels; None if they are compressed.
        planes: One for each frame.
        problem: Why there are no planes: what the file shows is no part of a 3D scan, or what it
            says about it is malformed.
    """

    uids: Uids
    kind: str
    told: str
    offset: int
    length: int | None
    planes: tuple[Plane, ...] = ()
    problem: RequestError | None = None


def read_image(file: StoredFile, index: int, check_cancelled: Callable[[], None]) -> Image | None:
    """Read what a file of an index says about its images, up to its pixels.

    Returns:
        Its images; None if it is not DICOM, or has no pixels.

    Raises:
        BrokenVolume: It is truncated or corrupt before it says of which series it is.
        NotAVolume: All of it is deflated.
    """
    head = read_head(file.open(check_cancelled), file.size)
    if head is None:
        return None
    values = head.dataset.values
    tags = (
        Tag.SOPClassUID,
        Tag.SOPInstanceUID,
        Tag.StudyInstanceUID,
        Tag.SeriesInstanceUID,
        Tag.FrameOfReferenceUID,
    )
    uids = Uids(*(values.get(tag, b"").decode("latin-1").rstrip(" \0") for tag in tags))
    about = uids, _kind(values), _told(values), head.offset, head.length
    try:
        if head.problem:
            raise head.problem
        pixels = _pixel_type(head)
        frames = _frames(head)
        planes = tuple(_plane(head, index, frame, pixels) for frame in range(frames))
        if head.length is not None and head.length < frames * pixels.frame_bytes:
            raise BrokenVolume(
                f"expected {frames * pixels.frame_bytes:,} bytes of pixels in a DICOM file, "
                f"got {head.length:,}"
            )
    except RequestError as error:  # Of this file alone: the scan may be another series.
        return Image(*about, problem=error.with_traceback(None))
    return Image(*about, planes)


def _kind(values: Mapping[int, bytes]) -> str:
    """Describe a series by what is neither text of somebody's nor a UID."""
    modality = values.get(Tag.Modality, b"").decode("latin-1").strip(" \0")
    number = values.get(Tag.SeriesNumber, b"").strip(b" \0")
    numbered = f", SeriesNumber {int(number)}" if SERIES_NUMBER.fullmatch(number) else ""
    return (modality if modality in MODALITIES else "other") + numbered


def _told(values: Mapping[int, bytes]) -> str:
    """Describe a series as people choose it, for whoever sent it."""
    text = values.get(Tag.SeriesDescription, b"").strip(b" \0")
    declared = values.get(Tag.SpecificCharacterSet, b"").decode("latin-1").strip(" \0")
    try:
        words = text.decode(declared if CHARACTER_SETS.fullmatch(declared) else "utf-8")
    except UnicodeDecodeError:
        words = text.decode("latin-1")
    parts = [f'"{show_controls(words[:TOLD_CHARACTERS])}"'] if words else []
    for name, tag in (("TR", Tag.RepetitionTime), ("TE", Tag.EchoTime)):
        with suppress(BrokenVolume):  # None, or no number.
            (ms,) = parse_numbers(values.get(tag, b"").decode("latin-1").strip(" \0"), 1, tag.name)
            parts.append(f"{name} {ms:.4g} ms")
    return ", ".join(parts)


def _pixel_type(head: Head) -> PixelType:
    """Read the type of the pixels, which must be one integer each."""
    values = head.dataset.values
    if head.length is not None and head.syntax not in PLAIN:
        raise BadVoxels("expected a transfer syntax of images, got an unknown one")
    photometric = values.get(Tag.PhotometricInterpretation, b"").rstrip(b" \0")
    grey = photometric in (b"MONOCHROME1", b"MONOCHROME2")
    if not grey or _integer(head, Tag.SamplesPerPixel, 1) != 1:
        raise BadVoxels("expected one grey value per pixel, got colours or a palette")
    if head.dataset.sequences.get(MODALITY_LUT):
        raise BadVoxels("expected values by RescaleSlope and RescaleIntercept, got a Modality LUT")
    allocated = _integer(head, Tag.BitsAllocated)
    bits = _integer(head, Tag.BitsStored, allocated)
    if allocated not in (8, 16, 32) or not 1 <= bits <= allocated:
        raise BadVoxels(f"expected pixels of 8, 16 or 32 bits, got {bits} of {allocated}")
    if _integer(head, Tag.HighBit, bits - 1) != bits - 1:
        raise BadVoxels("expected pixels in the lowest bits, got a HighBit above BitsStored")
    rows, columns = _integer(head, Tag.Rows), _integer(head, Tag.Columns)
    if not rows or not columns:
        raise BadGeometry(f"expected images with rows and columns, got {columns} x {rows}")
    if head.order == ">" and allocated == 8:
        raise BadVoxels("expected pixels of 16 or 32 bits in big-endian files, got 8")
    kind = "i" if _integer(head, Tag.PixelRepresentation, 0) else "u"
    dtype = np.dtype(f"{head.order}{kind}{allocated // 8}")
    return PixelType(head.syntax, rows, columns, dtype, bits)


def _frames(head: Head) -> int:
    """Return the number of frames, of which each must have a place if there are several."""
    text = head.dataset.values.get(Tag.NumberOfFrames, b"").decode("latin-1").strip(" \0")
    frames = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1
    places = len(head.dataset.sequences.get(PER_FRAME, ()))
    if places not in (0, frames) or frames < 1:
        raise BrokenVolume(f"expected functional groups for {frames} frames, got {places}")
    if frames > 1 and not places:
        raise BadGeometry(f"expected a place for each of {frames} frames, got none")
    types = head.dataset.values.get(Tag.ImageType, b"").split(b"\\")
    if not places and not MOSAICS.isdisjoint(one.strip(b" \0") for one in types):
        raise BadGeometry(
            "expected one slice in an image, got a mosaic of many, as Siemens and United Imaging "
            "write them; convert it to NIfTI, for example with dcm2niix"
        )
    return frames


def _plane(head: Head, file: int, frame: int, pixels: PixelType) -> Plane:
    def numbers(tag: Tag, count: int) -> tuple[float, ...] | None:
        value = _find(head.dataset, tag, frame)
        text = (value or b"").decode("latin-1").strip(" \0").replace("\\", " ")
        return tuple(parse_numbers(text, count, tag.name)) if text else None

    def required(tag: Tag, count: int) -> tuple[float, ...]:
        found = numbers(tag, count)
        if found is None:
            raise BadGeometry(f"expected a DICOM image with {tag.name}, got one without")
        return found

    thickness = None
    with suppress(BrokenVolume):  # Only a single slice needs it.
        thickness = numbers(Tag.SliceThickness, 1)
    (slope,) = numbers(Tag.RescaleSlope, 1) or (1.0,)
    (intercept,) = numbers(Tag.RescaleIntercept, 1) or (0.0,)
    if not np.isfinite((slope, intercept)).all():
        raise BadVoxels("expected a finite RescaleSlope and RescaleIntercept, got others")
    return Plane(
        file=file,
        frame=frame,
        pixels=pixels,
        orientation=required(Tag.ImageOrientationPatient, 6),
        spacing=required(Tag.PixelSpacing, 2),
        position=required(Tag.ImagePositionPatient, 3),
        thickness=thickness[0] if thickness else None,
        scale=(slope, intercept),
    )


def _find(dataset: Dataset, tag: Tag, frame: int) -> bytes | None:
    """Find a value in the functional groups of a frame, in those of all, or outside of them."""
    groups = dataset.sequences.get(PER_FRAME, [])[frame : frame + 1]
    for group in (*groups, *dataset.sequences.get(SHARED, [])[:1]):
        for item in group.sequences.get(GROUPS[tag], [])[:1]:
            if tag in item.values:
                return item.values[tag]
    return dataset.values.get(tag)


def _integer(head: Head, tag: Tag, default: int | None = None) -> int:
    """Read an unsigned integer of 16 bits."""
    value = head.dataset.values.get(tag, b"")
    if len(value) < 2:
        if default is None:
            raise BrokenVolume(f"expected a DICOM image with {tag.name}, got one without")
        return default
    return int(struct.unpack_from(head.order + "H", value)[0])
