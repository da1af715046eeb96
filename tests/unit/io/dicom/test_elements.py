"""Elements before the pixels: what is passed over, however deep it lies, and what is no image."""

import struct
from pathlib import Path

import pydicom.data
import pytest
from numpy.testing import assert_array_equal

from app.errors import BrokenVolume, NotAVolume
from app.io.volume import read_volume
from tests.support.dicom_files import PATIENT, as_dicom, changed, zipped
from tests.support.nifti_files import counting

MODALITY = b"\x08\0\x60\0CS"
PIXELS = b"\xe0\x7f\x10\0"
UNDEFINED = b"\xff" * 4
ITEM = b"\xfe\xff\0\xe0"
ENDS = b"\xfe\xff\x0d\xe0" + bytes(4) + b"\xfe\xff\xdd\xe0" + bytes(4)
"""Of an item, and of a sequence."""

ROWS = b"\x28\0\x10\0US" + struct.pack("<HH", 2, 99)
PLAIN = PIXELS + b"OW\0\0" + struct.pack("<I", 4) + b"icon"
COMPRESSED = (
    PIXELS
    + b"OB\0\0"
    + UNDEFINED
    + ITEM
    + bytes(4)
    + ITEM
    + struct.pack("<I", 4)
    + b"icon"
    + ENDS[8:]
)


def sequence(tag: bytes, form: bytes, elements: bytes) -> bytes:
    """Write a sequence of one item, neither of which says how long it is."""
    return tag + form + b"\0\0" + UNDEFINED + ITEM + UNDEFINED + elements + ENDS


@pytest.mark.parametrize(
    "passed_over",
    [
        sequence(b"\x88\0\0\2", b"SQ", ROWS + PLAIN),
        sequence(b"\x88\0\0\2", b"SQ", ROWS + COMPRESSED),
        # What is inside of UN is implicit (PS3.5, 6.2.2).
        sequence(b"\x89\0\x10\x10", b"UN", b"\x89\0\x11\x10" + struct.pack("<I", 4) + b"text"),
        sequence(b"\x89\0\x10\x10", b"UN", COMPRESSED.replace(b"OB\0\0", b"")),
        sequence(b"\x88\0\0\2", b"SQ", COMPRESSED.replace(b"OB", b"UN")),
    ],
    ids=["icon", "compressed icon", "of unknown elements", "icon among them", "of unknown pixels"],
)
def test_sequences_that_do_not_say_how_long_they_are_are_passed_over(passed_over: bytes) -> None:
    files = [file.replace(PIXELS, passed_over + PIXELS) for file in as_dicom()]
    volume = read_volume(zipped(files))
    assert_array_equal(volume.voxels, counting())
    assert volume.warnings == ()


def test_sequences_in_each_other_without_end_are_refused() -> None:
    deep = (b"\x08\0\x15\x11SQ\0\0" + UNDEFINED + ITEM + UNDEFINED) * 1000
    with pytest.raises(BrokenVolume, match=r"^expected sequences at most 16 deep, got"):
        read_volume(as_dicom()[0].replace(MODALITY, deep + MODALITY))


def test_pixels_of_floats_are_no_image() -> None:
    """They are of 32 bits, as integers may be."""
    file = changed(as_dicom(counting(dtype="uint32"))[0], PixelData=None, FloatPixelData=bytes(140))
    with pytest.raises(NotAVolume, match="expected DICOM images, got none"):
        read_volume(file)


def test_deflated_file_is_refused_as_such() -> None:
    path = Path(pydicom.data.__file__).parent / "test_files" / "image_dfl.dcm"
    with pytest.raises(NotAVolume, match="got a deflated one"):
        read_volume(path.read_bytes())


def test_file_that_ends_within_a_value_that_is_passed_over_is_truncated() -> None:
    first, *others = as_dicom()
    cut = first[: first.index(PATIENT.encode()) + 1]
    with pytest.raises(BrokenVolume, match=r"got a truncated one, in file 1 of 4 in the archive$"):
        read_volume(zipped([cut, *others]))
