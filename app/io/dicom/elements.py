"""First bytes -> Head: the data elements of a DICOM file that say what its images are, and where.

Structure as in PS3.5, section 7. All other elements are passed over by their length, so that what
they hold (names, dates, most texts) is never even decoded, and takes no memory.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from app.errors import BrokenVolume, NotAVolume
from app.io.dicom.archive import DICOM_MAGIC, PREAMBLE_BYTES
from app.io.gzip_stream import FileStream

HEAD_BYTES: Final = 8 << 20
"""Before the pixels: enhanced multi-frame files have a kilobyte or so for each frame."""

FIRST_BYTES: Final = 16 << 10
"""Looked at first; most files need no more."""

VALUE_BYTES: Final = 256
"""Of a value that is kept: several times what the longest honest one takes."""

MAX_ITEMS: Final = 1 << 13
"""Of a sequence that is kept, such as that of frames; each takes three kilobytes."""

MAX_DEPTH: Final = 16
UNDEFINED: Final = 0xFFFFFFFF


class Tag(IntEnum):
    """Tags of the values that are kept, by their keywords in PS3.6."""

    TransferSyntaxUID = 0x00020010
    SpecificCharacterSet = 0x00080005
    ImageType = 0x00080008
    SOPClassUID = 0x00080016
    SOPInstanceUID = 0x00080018
    Modality = 0x00080060
    SeriesDescription = 0x0008103E
    SliceThickness = 0x00180050
    RepetitionTime = 0x00180080
    EchoTime = 0x00180081
    StudyInstanceUID = 0x0020000D
    SeriesInstanceUID = 0x0020000E
    SeriesNumber = 0x00200011
    ImagePositionPatient = 0x00200032
    ImageOrientationPatient = 0x00200037
    FrameOfReferenceUID = 0x00200052
    SamplesPerPixel = 0x00280002
    PhotometricInterpretation = 0x00280004
    NumberOfFrames = 0x00280008
    Rows = 0x00280010
    Columns = 0x00280011
    PixelSpacing = 0x00280030
    BitsAllocated = 0x00280100
    BitsStored = 0x00280101
    HighBit = 0x00280102
    PixelRepresentation = 0x00280103
    RescaleIntercept = 0x00281052
    RescaleSlope = 0x00281053


VALUES: Final = frozenset(Tag)

TOLD: Final = frozenset(
    (Tag.SpecificCharacterSet, Tag.SeriesDescription, Tag.RepetitionTime, Tag.EchoTime)
)
"""Of these, which a scan does not need, one that is too long is passed over."""

DIRECTORY: Final = 0x00041220
"""The files that a DICOMDIR lists, which has no pixels."""

MODALITY_LUT: Final = 0x00283000
SHARED: Final = 0x52009229
PER_FRAME: Final = 0x52009230
PLANE_POSITION: Final = 0x00209113
PLANE_ORIENTATION: Final = 0x00209116
PIXEL_MEASURES: Final = 0x00289110
PIXEL_VALUES: Final = 0x00289145
SEQUENCES: Final = frozenset(
    (
        MODALITY_LUT, SHARED, PER_FRAME,
        PLANE_POSITION, PLANE_ORIENTATION, PIXEL_MEASURES, PIXEL_VALUES,
    )
)  # fmt: skip

PIXELS: Final = 0x7FE00010
OTHER_PIXELS: Final = (0x7FE00008, 0x7FE00009)
"""Of floats."""

ITEM: Final = 0xFFFEE000
ITEM_END: Final = 0xFFFEE00D
SEQUENCE_END: Final = 0xFFFEE0DD

LONG: Final = frozenset(
    (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")
)
"""Value representations with a length of four bytes."""

EXPLICIT: Final = "1.2.840.10008.1.2.1"
IMPLICIT: Final = "1.2.840.10008.1.2"
BIG_ENDIAN: Final = "1.2.840.10008.1.2.2"
DEFLATED: Final = "1.2.840.10008.1.2.1.99"
PLAIN: Final = (EXPLICIT, IMPLICIT, BIG_ENDIAN)
"""Transfer syntaxes whose pixels are not compressed; private ones may order bytes otherwise."""


@dataclass(slots=True)
class Dataset:
    """Elements of a file, or of an item of a sequence.

    Attributes:
        values: The values that are kept, as they are stored, by tag.
        sequences: The items of the sequences that are kept, by tag.
    """

    values: dict[int, bytes] = field(default_factory=dict)
    sequences: dict[int, list["Dataset"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Head:
    """A file up to its pixels.

    Attributes:
        dataset: Its elements.
        syntax: The UID of its transfer syntax.
        offset: Position of the pixels in the file, in bytes.
        length: Bytes of the pixels; None if they are compressed.
        problem: Why there are neither pixels nor the elements before them, but those of its series.
    """

    dataset: Dataset
    syntax: str
    offset: int
    length: int | None
    problem: BrokenVolume | None = None

    @property
    def order(self) -> str:
        """The byte order, as ``struct`` has it."""
        return ">" if self.syntax == BIG_ENDIAN else "<"


def read_head(stream: FileStream, size: int) -> Head | None:
    """Read the elements of a file.

    Args:
        stream: At the file's first byte, where it stays.
        size: Bytes of the file.

    Returns:
        The elements; None if the file is not DICOM, or has no pixels.

    Raises:
        BrokenVolume: The file is truncated or corrupt, or its pixels come too late; and nobody
            knows of which series it is.
        NotAVolume: All of it is deflated.
    """
    start = PREAMBLE_BYTES + len(DICOM_MAGIC)
    if stream.peek(start)[PREAMBLE_BYTES:] != DICOM_MAGIC:
        return None
    wanted = FIRST_BYTES
    while True:
        walker = _Walker(stream.peek(min(wanted, size)), size, stream.check_cancelled)
        try:
            return walker.read_file()
        except _TooShort as error:
            wanted = max(2 * wanted, error.needed)
            if error.needed > size:
                problem = BrokenVolume("expected a whole DICOM file, got a truncated one")
            elif wanted > HEAD_BYTES:
                problem = BrokenVolume(
                    f"expected the pixels of a DICOM file within its first {HEAD_BYTES:,} bytes, "
                    "got more before them"
                )
            else:
                continue
        except BrokenVolume as error:
            problem = error
        if Tag.SeriesInstanceUID not in walker.dataset.values:
            raise problem
        return Head(walker.dataset, "", 0, 0, problem)


class _TooShort(Exception):  # noqa: N818 - it asks for more, and is no error
    """More bytes are needed."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class _Walker:
    """Walks over the elements of a file, of which the first bytes are there.

    Args:
        data: The first bytes.
        size: Bytes of the whole file.
        check_cancelled: Called for each element; raises once nobody waits for the file any more.

    Attributes:
        dataset: The file's elements, as far as they have been read.
    """

    def __init__(self, data: bytes, size: int, check_cancelled: Callable[[], None]) -> None:
        self.dataset = Dataset()
        self._data = data
        self._check_cancelled = check_cancelled
        self._size = size
        self._at = PREAMBLE_BYTES + 4
        self._order = "<"
        self._explicit = True
        self._pixels: tuple[int, int] | None = None

    def read_file(self) -> Head | None:
        """Read all elements up to the pixels; None if there are none."""
        meta = self._read_meta()
        syntax = meta.values.get(Tag.TransferSyntaxUID, b"").decode("latin-1").rstrip(" \0")
        if not all(part.isdigit() for part in syntax.split(".")):
            raise BrokenVolume("expected a DICOM file with a transfer syntax, got one without")
        if syntax == DEFLATED:
            raise NotAVolume(
                "expected DICOM files as they are, or in a ZIP archive, got a deflated one"
            )
        self._order = ">" if syntax == BIG_ENDIAN else "<"
        self._explicit = syntax != IMPLICIT
        self._read_dataset(self.dataset, self._size, keep=True, depth=0)
        if self._at > self._size:
            raise _TooShort(self._at)
        if self._pixels is None:
            return None
        offset, length = self._pixels
        return Head(self.dataset, syntax, offset, None if length == UNDEFINED else length)

    def _read_meta(self) -> Dataset:
        """Read the elements of group 2, which are little-endian with explicit representations."""
        meta = Dataset()
        while self._need(2)[:2] == b"\x02\0":
            tag, _, length = self._read_tag()
            if tag == Tag.TransferSyntaxUID:
                meta.values[tag] = self._read_value(length)
            else:
                self._at += length
        return meta

    def _read_dataset(self, dataset: Dataset, end: int | None, *, keep: bool, depth: int) -> None:
        """Read elements up to a position, or to the end of an item if that is None."""
        while end is None or self._at < end:
            tag, form, length = self._read_tag()
            if tag == ITEM_END and end is None:
                break
            if depth == 0 and tag in (PIXELS, *OTHER_PIXELS, DIRECTORY):
                self._pixels = (self._at, length) if tag == PIXELS else None
                break
            kept = keep and tag in SEQUENCES
            if length == UNDEFINED or kept:
                items = self._read_items(tag, form, length, keep=kept, depth=depth + 1)
                if kept:
                    dataset.sequences[tag] = items
            elif keep and tag in VALUES and (length <= VALUE_BYTES or tag not in TOLD):
                dataset.values[tag] = self._read_value(length)
            else:
                self._at += length
            # Elements ascend: a file that has had no rows by then holds a document, or raw data.
            is_long = depth == 0 and self._at > HEAD_BYTES
            if is_long and tag > Tag.Rows and Tag.Rows not in dataset.values:
                break

    def _read_items(
        self, tag: int, form: bytes, length: int, *, keep: bool, depth: int
    ) -> list[Dataset]:
        """Read the items of a sequence, or pass over the fragments of compressed pixels."""
        if depth > MAX_DEPTH:
            raise BrokenVolume(f"expected sequences at most {MAX_DEPTH} deep, got deeper ones")
        explicit, self._explicit = self._explicit, self._explicit and form != b"UN"
        fragments = tag == PIXELS or form in (b"OB", b"OW")
        end = None if length == UNDEFINED else self._at + length
        items: list[Dataset] = []
        while end is None or self._at < end:
            delimiter, _, size = self._read_tag()
            if delimiter == SEQUENCE_END:
                break
            if delimiter != ITEM:
                raise _corrupt()
            if fragments:
                self._at += size
                continue
            item_end = None if size == UNDEFINED else self._at + size
            item = Dataset()
            self._read_dataset(item, item_end, keep=keep, depth=depth)
            if keep:
                items.append(item)
            if len(items) > MAX_ITEMS:
                raise BrokenVolume(f"expected at most {MAX_ITEMS:,} frames, got more")
        self._explicit = explicit
        return items

    def _read_tag(self) -> tuple[int, bytes, int]:
        """Read the start of an element: tag, value representation (if it has one) and length."""
        self._check_cancelled()
        head = self._need(8)
        group, element = struct.unpack_from(self._order + "HH", head)
        tag = group << 16 | element
        self._at += 8
        if group == 0xFFFE or not self._explicit:
            return tag, b"", struct.unpack_from(self._order + "I", head, 4)[0]
        form = head[4:6]
        if form in LONG:
            (length,) = struct.unpack(self._order + "I", self._need(4))
            self._at += 4
            return tag, form, length
        if not (form.isalpha() and form.isupper()):
            raise _corrupt()
        return tag, form, struct.unpack_from(self._order + "H", head, 6)[0]

    def _read_value(self, length: int) -> bytes:
        if length > VALUE_BYTES:
            raise _corrupt()
        value = self._need(length)
        self._at += length
        return value

    def _need(self, count: int) -> bytes:
        """Return the next bytes, which stay the next."""
        if self._at + count > len(self._data):
            raise _TooShort(self._at + count)
        return self._data[self._at : self._at + count]


def _corrupt() -> BrokenVolume:
    return BrokenVolume("expected the elements of a DICOM file, got something else")
