"""Archives of scans: how many there are in one, and each of them out of it."""

import io
import zipfile
import zlib
from functools import partial

import numpy as np
import pytest

from app.errors import BrokenVolume, NotAVolume, TooLarge
from app.io.dicom import archive
from app.io.scan_archive import MAX_ENTRIES, MAX_SCANS, count_scans, find_scan
from tests.support.dicom_files import as_dicom, zipped
from tests.support.nifti_files import nifti
from tests.support.scan_files import EMPTY_BLOCKS

ENOUGH = 1 << 30
SCANS = (nifti(), nifti(zipped=True), b"notes")


def extracted(content: bytes, number: int, max_bytes: int = ENOUGH) -> bytes:
    stream = find_scan(content, number, max_bytes).open(lambda: None)
    return b"".join(iter(partial(stream.read, 100), b""))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_file_of_an_archive_is_a_scan(method: int) -> None:
    content = zipped(SCANS, method)
    assert count_scans(content, ENOUGH) == len(SCANS)
    assert [extracted(content, number) for number in range(len(SCANS))] == list(SCANS)


def test_scans_are_numbered_without_folders_and_empty_files() -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in (("a/", b""), ("a/1", b"first"), ("a/empty", b""), ("a/2", b"second")):
            archive.writestr(name, content)
    content = target.getvalue()
    assert count_scans(content, ENOUGH) == 2
    assert extracted(content, 1) == b"second"


@pytest.mark.parametrize(
    "content",
    [nifti(), as_dicom()[0], zipped(as_dicom()), zipped([b"notes", *as_dicom()])],
    ids=["NIfTI", "DICOM file", "series", "series with notes"],
)
def test_what_is_one_scan_is_not_split(content: bytes) -> None:
    assert count_scans(content, ENOUGH) is None


@pytest.mark.parametrize("files", [[], [b"", b""]], ids=["empty", "of empty files"])
def test_archive_without_scans_is_refused(files: list[bytes]) -> None:
    """It was a job of one scan, which failed."""
    with pytest.raises(NotAVolume, match="expected an archive of scans, got one without any"):
        count_scans(zipped(files), ENOUGH)


def test_image_is_known_by_its_start_however_badly_that_is_compressed() -> None:
    image = np.random.default_rng(1).bytes(128) + as_dicom()[0][128:]
    assert count_scans(zipped([image], zipfile.ZIP_DEFLATED), ENOUGH) is None


def test_what_lies_behind_empty_blocks_is_not_looked_for() -> None:
    """There may be a thousand such files, and all calls of jobs wait while they are counted."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    hidden = EMPTY_BLOCKS * 1000 + packer.compress(as_dicom()[0]) + packer.flush()
    content = bytearray(zipped([b"?" * len(hidden)], zipfile.ZIP_STORED))
    start = content.index(b"?")
    content[start : start + len(hidden)] = hidden
    content[content.index(b"PK\x01\x02") + 10] = zipfile.ZIP_DEFLATED
    assert count_scans(content, ENOUGH) == 1


def test_archives_of_series_are_scans() -> None:
    series = zipped(as_dicom())
    content = zipped([series, series])
    assert count_scans(content, ENOUGH) == 2
    assert extracted(content, 1) == series


def test_archive_of_too_many_scans_is_refused() -> None:
    assert count_scans(zipped([b"x"] * MAX_SCANS), ENOUGH) == MAX_SCANS
    with pytest.raises(TooLarge, match=r"at most 1,000 scans in an archive, .* got 1,001"):
        count_scans(zipped([b"x"] * (MAX_SCANS + 1)), ENOUGH)


def test_archive_of_too_many_empty_files_is_refused_and_no_further_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at = list[int]()
    begin = archive._begin  # noqa: SLF001 - counted

    def note(view: memoryview, at: int) -> int:
        looked_at.append(at)
        return begin(view, at)

    monkeypatch.setattr(archive, "_begin", note)
    files = [b"a scan", *[b""] * (MAX_ENTRIES - 1)]
    assert count_scans(zipped(files), ENOUGH) == 1
    looked_at.clear()
    with pytest.raises(TooLarge, match=r"4,000 with folders and empty files, got 20,000"):
        count_scans(zipped([*files, *[b""] * 16_000]), ENOUGH)
    assert len(looked_at) == MAX_ENTRIES


def test_archive_that_declares_too_much_is_refused() -> None:
    with pytest.raises(TooLarge, match="once inflated"):
        count_scans(zipped([bytes(100_000)]), 99_999)


def test_scan_of_an_archive_is_bounded() -> None:
    content = zipped([bytes(100_000)])
    assert extracted(content, 0, 100_000) == bytes(100_000)
    with pytest.raises(TooLarge, match=r"at most 99999 bytes, got 100000; .*MAX_BODY_BYTES"):
        extracted(content, 0, 99_999)


@pytest.mark.parametrize("size", [200, 1000], ids=["as short as its start", "longer"])
def test_damaged_scan_of_an_archive_is_named_as_such(size: int) -> None:
    """Damage in the start of one refused the whole archive, and discarded it once uploaded."""
    content = bytearray(zipped([b"a" * 1000, b"b" * size], zipfile.ZIP_STORED))
    content[content.index(b"bbb")] ^= 1
    assert count_scans(content, ENOUGH) == 2
    assert extracted(bytes(content), 0) == b"a" * 1000
    with pytest.raises(BrokenVolume):
        extracted(bytes(content), 1)
