"""ZIP archives: truncated, encrypted, overlapping, too large, and bombs."""

import io
import struct
import time
import tracemalloc
import zipfile
import zlib

import pydicom
import pytest
from numpy.testing import assert_array_equal
from pydicom import Dataset
from pydicom.uid import ExplicitVRLittleEndian, MediaStorageDirectoryStorage

from app.errors import BadGeometry, BrokenVolume, NotAVolume, RequestError, TooLarge
from app.io.dicom import check_start
from app.io.dicom.archive import DIRECTORY_MAGIC, END_MAGIC, ENTRY, ENTRY_MAGIC, list_files
from app.io.volume import VolumeLimits, check_header, read_volume
from tests.support.dicom_files import as_dicom, as_enhanced, changed, write, zipped
from tests.support.nifti_files import counting

LIMIT = 1 << 30

TWO = zipped([b"x" * 1000, b"y"])
CUT_OFF = ENTRY_MAGIC + DIRECTORY_MAGIC
"""Behind an archive: the starts of records that its end cuts off."""


def read_all(content: bytes) -> list[bytes]:
    return [file.open(lambda: None).read(file.size) for file in list_files(content, LIMIT)]


def put(content: bytes, magic: bytes, at: int, form: str, value: int) -> bytes:
    """Overwrite a field of the first record with some magic."""
    changed = bytearray(content)
    struct.pack_into(form, changed, content.index(magic) + at, value)
    return bytes(changed)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_files_are_read_in_the_order_of_the_directory(method: int) -> None:
    files = [b"one" * 100, b"", b"two" * 70_000]
    assert read_all(zipped(files, method)) == files
    assert not read_all(zipped([b""], method, "folder-{}/"))


@pytest.mark.parametrize("size", [0xFFFF, 0xFFFF - ENTRY.size - 1])
def test_files_and_places_of_65535_bytes_are_no_zip64(size: int) -> None:
    files = [b"x" * size, b"y"]
    assert read_all(zipped(files, zipfile.ZIP_STORED, "{}")) == files
    assert read_all(zipped(files[:1], zipfile.ZIP_STORED, "{}")) == files[:1]


def test_archive_with_a_comment_and_written_as_a_stream_is_read() -> None:
    class Pipe(io.BytesIO):
        """Cannot seek back, so that sizes come behind each file."""

        def tell(self) -> int:
            raise io.UnsupportedOperation

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"content" * 99)
        archive.comment = b"PK" * 1000
    assert read_all(pipe.getvalue()) == [b"content" * 99]


@pytest.mark.parametrize("kept", [4, 30, -1, -22, -23, -100])
def test_truncated_archive_is_refused(kept: int) -> None:
    with pytest.raises(BrokenVolume, match=r"^expected .* ZIP archive.*, got"):
        list_files(zipped(as_dicom())[:kept], LIMIT)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_checksum_is_verified(method: int) -> None:
    content = zipped([b"x" * 1000], method)
    damaged = put(content, DIRECTORY_MAGIC, 16, "<I", 7)
    with pytest.raises(BrokenVolume, match="corrupt"):
        read_all(damaged)


def test_entry_shorter_than_declared_is_truncated() -> None:
    content = put(zipped([b"x" * 1000]), DIRECTORY_MAGIC, 24, "<I", 1001)
    (file,) = list_files(content, LIMIT)
    with pytest.raises(BrokenVolume, match="truncated"):
        file.open(lambda: None).read(1001)


@pytest.mark.parametrize(("at", "value"), [(24, 1001), (20, 999)], ids=["inflated", "stored"])
def test_stored_entry_that_declares_more_than_it_holds_is_refused_unread(
    at: int, value: int
) -> None:
    """A file that is no image is not read to its end; and a job asks the disk for all of it."""
    content = put(zipped([b"x" * 1000], zipfile.ZIP_STORED), DIRECTORY_MAGIC, at, "<I", value)
    with pytest.raises(BrokenVolume, match="no larger than what they are stored in"):
        list_files(content, LIMIT)


@pytest.mark.parametrize(
    ("magic", "at", "form", "value", "error", "said"),
    [
        (DIRECTORY_MAGIC, 8, "<H", 1, BrokenVolume, "an encrypted one"),
        (DIRECTORY_MAGIC, 10, "<H", 12, BrokenVolume, "got method 12"),
        (DIRECTORY_MAGIC, 20, "<I", 0xFFFFFFFF, NotAVolume, "ZIP64"),
        (END_MAGIC, 16, "<I", 0xFFFFFFFF, NotAVolume, "ZIP64"),
        (DIRECTORY_MAGIC, 24, "<I", 0x7FFFFFFF, TooLarge, "LANDMARKD_MAX_INFLATED_BYTES"),
        (DIRECTORY_MAGIC, 24, "<I", 0x00FFFFFF, BrokenVolume, "what they are stored in"),
        (DIRECTORY_MAGIC, 42, "<I", 3, BrokenVolume, "where its directory says"),
        (DIRECTORY_MAGIC, 42, "<I", len(TWO), BrokenVolume, "where its directory says"),
        (
            *(DIRECTORY_MAGIC, 32, "<H", len(TWO) + 4 - TWO.rindex(DIRECTORY_MAGIC)),
            *(BrokenVolume, "a whole directory"),
        ),
        (END_MAGIC, 10, "<H", 9, BrokenVolume, "a whole directory"),
        (END_MAGIC, 10, "<H", 0xFFFF, NotAVolume, "ZIP64"),
        (END_MAGIC, 16, "<I", 1 << 30, BrokenVolume, "within one file"),
    ],
)
def test_directory_that_cannot_be_true_is_refused(
    magic: bytes, at: int, form: str, value: int, error: type[RequestError], said: str
) -> None:
    content = put(TWO + CUT_OFF, magic, at, form, value)
    with pytest.raises(error, match=f"^expected .*{said}"):
        list_files(content, LIMIT)


@pytest.mark.parametrize(("at", "value"), [(42, 0), (20, 2000)], ids=["first", "directory"])
def test_entry_that_overlaps_another_or_the_directory_is_refused(at: int, value: int) -> None:
    content = zipped([b"x" * 1000, b"x" * 1000])
    second = content.rindex(DIRECTORY_MAGIC)
    twice = bytearray(content)
    struct.pack_into("<I", twice, second + at, value)
    with pytest.raises(BrokenVolume, match="do not overlap"):
        list_files(bytes(twice), LIMIT)


def test_encryption_is_seen_in_the_first_bytes() -> None:
    content = bytearray(zipped([b"x" * 1000]))
    check_start(bytes(content[:64]))
    content[6] |= 1
    with pytest.raises(BrokenVolume, match="an encrypted one"):
        check_start(bytes(content[:64]))


def many_entries(count: int) -> bytes:
    """Write an archive of tiny entries, faster than ``zipfile`` does."""
    data = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = data.compress(b"z" * 200) + data.flush()
    crc = zlib.crc32(b"z" * 200)
    entry = (
        struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, crc, len(body), 200, 1, 0) + b"n" + body
    )
    directory = b"".join(
        struct.pack(
            "<4s6H3I5H2I", DIRECTORY_MAGIC, 20, 20, 0, 8, 0, 0, crc, len(body), 200,
            1, 0, 0, 0, 0, 0, at * len(entry),
        ) + b"n"
        for at in range(count)
    )  # fmt: skip
    end = struct.pack(
        "<4s4H2IH", END_MAGIC, 0, 0, count, count, len(directory), count * len(entry), 0
    )
    return entry * count + directory + end


def test_sixteen_thousand_tiny_entries_take_seconds_and_little_memory() -> None:
    content = many_entries(16_000)
    began = time.process_time()
    with pytest.raises(NotAVolume, match=r"expected DICOM images, got none \(files in all: 16,000"):
        read_volume(content)
    assert time.process_time() - began < 5


def test_bomb_takes_no_more_memory_than_the_head_of_a_file() -> None:
    head = as_dicom()[0]
    # A text of 290 MiB before the pixels: it inflates from 300 KiB.
    at = head.index(b"\x08\x00\x60\x00CS")
    element = struct.pack("<HH2sHI", 8, 1, b"UT", 0, 290 << 20)
    bomb = zipped([head[:at] + element + bytes(300 << 20)])
    limits = VolumeLimits(inflated_bytes=1 << 32)
    tracemalloc.start()
    try:
        with pytest.raises(BrokenVolume, match="within its first"):
            check_header(bomb, limits)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1 << 20, 9 << 20])
def test_documents_and_raw_data_of_any_length_are_no_images(size: int) -> None:
    without = {"Rows": None, "PixelData": None}
    document = {"EncapsulatedDocument": bytes(size), "MIMETypeOfEncapsulatedDocument": "text/xml"}
    files = [changed(file, **without, **document) for file in as_dicom()[:1]]
    assert (
        read_volume(zipped([*files, *as_dicom()])).warnings[0]
        == "ignored files beside those of the scan: 1"
    )
    with pytest.raises(NotAVolume, match="expected DICOM images, got none"):
        check_header(files[0])
    with pytest.raises(BrokenVolume, match="within its first"):
        check_header(changed(as_dicom()[0], EncapsulatedDocument=bytes(9 << 20)))


def of_unknown_length(keyword: str) -> Dataset:
    """Make a sequence of 9 MiB whose end is marked, rather than told by its length."""
    item = Dataset()
    item.TextValue = "0" * (9 << 20)
    item.is_undefined_length_sequence_item = True
    dataset = Dataset()
    setattr(dataset, keyword, [item])
    dataset[keyword].is_undefined_length = True
    return dataset


def cut_off(file: bytes) -> bytes:
    """End a file within an element behind the series that it is of."""
    return file[: file.index(b"\x28\0\x10\0US") + 4]


def test_structures_and_segmentations_of_any_size_refuse_their_series_alone() -> None:
    structures = pydicom.dcmread(io.BytesIO(as_dicom(SeriesInstanceUID="1.2.9")[0]))
    del structures.Rows, structures.PixelData
    structures.update(of_unknown_length("ROIContourSequence"))
    frames = [Dataset()] * 8193
    others = [
        write(structures, ExplicitVRLittleEndian),
        as_enhanced(SeriesInstanceUID="1.2.8", PerFrameFunctionalGroupsSequence=frames),
        cut_off(as_dicom(SeriesInstanceUID="1.2.7")[0]),
    ]
    for other in others:
        with pytest.raises(BrokenVolume, match=r"^expected .*, got "):
            read_volume(other)
    volume = read_volume(zipped([*others, *as_dicom()]))
    assert_array_equal(volume.voxels, counting())
    assert volume.warnings[0] == "ignored files beside those of the scan: 3"


def test_truncated_file_of_the_series_itself_is_not_ignored() -> None:
    files = as_dicom()
    with pytest.raises(BrokenVolume, match=r"a truncated one, in 1 of 4 files of the series"):
        read_volume(zipped([cut_off(files[0]), *files[1:]]))


def test_dicomdir_of_any_size_is_no_image() -> None:
    directory = of_unknown_length("DirectoryRecordSequence")
    directory.SOPClassUID = MediaStorageDirectoryStorage
    files = [write(directory, ExplicitVRLittleEndian), *as_dicom()]
    assert read_volume(zipped(files)).warnings[0] == "ignored files beside those of the scan: 1"


def test_files_without_anything_in_them_may_be_slices_that_lack() -> None:
    first, second, third, _ = as_dicom()
    volume = read_volume(zipped([first, second, third, b""]))
    assert volume.voxels.shape == (7, 5, 3)
    assert volume.warnings == ("empty files beside those of the scan: 1; was all of it copied?",)


def test_series_alike_are_told_apart_by_their_numbers_and_by_no_date() -> None:
    for number, said in ((-3, "CT, SeriesNumber -3, 7 x"), (19800229, "CT, 7 x")):
        files = [*as_dicom(SeriesNumber=number), *as_dicom(SeriesInstanceUID="9.2.3")]
        with pytest.raises(BadGeometry, match=f'series 0: "[^"]*", 4 images, {said}'):
            check_header(zipped(files))


def test_archive_larger_than_allowed_is_refused_by_its_directory() -> None:
    with pytest.raises(TooLarge, match="LANDMARKD_MAX_INFLATED_BYTES"):
        check_header(zipped([bytes(10_000_000)]), VolumeLimits(inflated_bytes=9_999_999))
