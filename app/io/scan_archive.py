"""A ZIP archive of scans -> its scans, one by one; anything else is one scan.

A ZIP archive with a DICOM file in it is one scan, too: the files of a series. Names in an archive
are not used: its scans are numbered in the order of its directory, without folders and empty files.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Final

from app.errors import BrokenVolume, NotAVolume, TooLarge
from app.io.dicom import StoredFile, count_entries, is_dicom, list_files
from app.io.gzip_stream import MAX_INFLATION, Content

START_BYTES: Final = 256
"""Of a file, which tell whether it is DICOM."""

STORED_BYTES: Final = 1 << 10
"""Of a file as it is stored, in which these are: more may hold nothing, in each of 1,000 files."""

MAX_SCANS: Final = 1000
MAX_ENTRIES: Final = 4 * MAX_SCANS
"""Scans, folders and empty files of an archive: its directory is read again for each scan."""


def count_scans(content: Content, max_bytes: int) -> int | None:
    """Count the files of an archive of scans, whether they can be read or not.

    Args:
        content: Of a file.
        max_bytes: Bytes of all files together, once inflated.

    Returns:
        Their number; None if the file is one scan.

    Raises:
        NotAVolume, BrokenVolume, TooLarge: As ``read_volume``, of archives; or there are more than
            ``MAX_SCANS``, or ``MAX_ENTRIES`` with folders and empty files.
    """
    if not is_dicom(content):
        return None
    entries = count_entries(content)
    files = _list_scans(content, max_bytes, MAX_ENTRIES)
    if any(_is_image(file) for file in files[: MAX_SCANS + 1]):
        return None
    if len(files) > MAX_SCANS or entries > MAX_ENTRIES:
        raise TooLarge(
            f"expected at most {MAX_SCANS:,} scans in an archive, and {MAX_ENTRIES:,} with folders "
            f"and empty files, got {entries:,}"
        )
    if not files:
        raise NotAVolume("expected an archive of scans, got one without any file that is not empty")
    return len(files)


def find_scan(content: Content, number: int, max_bytes: int) -> StoredFile:
    """Find one scan of an archive, by its number from 0, which may be corrupt there.

    Raises:
        TooLarge: It is larger than allowed.
    """
    file = _list_scans(content, len(content) * MAX_INFLATION)[number]
    if file.size > max_bytes:
        raise TooLarge(
            f"expected a scan of at most {max_bytes} bytes, got {file.size}; the operator's "
            "limits are LANDMARKD_MAX_BODY_BYTES and 3/16 of LANDMARKD_MEMORY"
        )
    return file


def _list_scans(content: Content, max_bytes: int, most: int | None = None) -> list[StoredFile]:
    """List the files of an archive that hold anything; raises as ``list_files``."""
    return [file for file in list_files(content, max_bytes, most) if file.size]


def _is_image(file: StoredFile) -> bool:
    """Say whether a file is a DICOM file, and no archive itself."""
    with suppress(BrokenVolume):  # That scan fails once it is read, and no other with it.
        file = replace(file, content=file.content[:STORED_BYTES])
        start = file.open(lambda: None).peek(START_BYTES)
        return is_dicom(start) and not start.startswith(b"PK")
    return False
