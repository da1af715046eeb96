"""Bytes -> StoredFiles: the files of a ZIP archive, or a DICOM file as an archive of itself.

Only the directory at the archive's end is believed, and only where it is consistent: entries that
overlap could make a small archive stand for a huge one. Nothing is inflated before it is read.
"""

import io
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from isal import igzip, igzip_lib, isal_zlib
from typing_extensions import Buffer

from app.errors import BrokenVolume, NotAVolume, TooLarge
from app.io.gzip_stream import MAX_INFLATION, Content, FileStream, InflatedFile, MemoryFile

PREAMBLE_BYTES: Final = 128
DICOM_MAGIC: Final = b"DICM\x02\0"
"""Behind the preamble, with the group of the first element."""

OWN_REPORT: Final = b"\x08\0\x60\0CS\x02\0SR\x08\0\x70\0LO\x0a\0landmarkd "
"""Modality and manufacturer, one behind the other, in a report that ``report`` has written."""

ENTRY_MAGIC: Final = b"PK\x03\x04"
DIRECTORY_MAGIC: Final = b"PK\x01\x02"
END_MAGIC: Final = b"PK\x05\x06"

ENTRY: Final = struct.Struct("<4s5H3I2H")
DIRECTORY: Final = struct.Struct("<4s6H3I5H2I")
END: Final = struct.Struct("<4s4H2IH")

COMMENT_BYTES: Final = 0xFFFF
"""Most behind the end of the directory."""

STORED, DEFLATED = 0, 8
ENCRYPTED: Final = 0x2041
"""The bits of the flags: traditional or strong encryption, or of the directory."""

ZIP64_ENTRIES: Final = 0xFFFF
ZIP64: Final = 0xFFFFFFFF
"""Numbers of entries, and of bytes, that stand for larger ones elsewhere."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it is stored; ``size`` and ``crc``, if there is one, are of the inflated bytes."""

    content: memoryview
    size: int
    crc: int | None = None
    deflated: bool = False

    def open(self, check_cancelled: Callable[[], None]) -> FileStream:
        """Open the file to be read from its start."""
        opened = None if self.crc is None else io.BufferedReader(_CheckedFile(self))
        return FileStream(self.content, check_cancelled, opened)


def is_dicom(head: Content) -> bool:
    """Say whether a file is one that this package reads: DICOM, or a ZIP archive."""
    magic = bytes(head[PREAMBLE_BYTES : PREAMBLE_BYTES + len(DICOM_MAGIC)])
    return bytes(head[:4]) in (ENTRY_MAGIC, END_MAGIC) or magic == DICOM_MAGIC


def is_own_report(head: Content) -> bool:
    """Say whether a file is a report of ours, by its first kilobyte: no part of any scan."""
    return OWN_REPORT in bytes(head)


def check_start(head: Content) -> None:
    """Check what the start of an archive tells, before the rest of it is there.

    Raises:
        BrokenVolume: Its first entry is encrypted, or compressed as nothing here is.
    """
    if len(head) >= ENTRY.size and bytes(head[:4]) == ENTRY_MAGIC:
        _, _, flags, method, *_ = ENTRY.unpack_from(head)
        _check_method(flags, method)


def count_entries(content: Content) -> int:
    """Count the files and folders that an archive says it holds; raises as ``list_files``."""
    view = memoryview(content).cast("B")
    return _find_directory(view)[1] if _is_archive(view) else 1


def list_files(content: Content, max_bytes: int, most: int | None = None) -> list[StoredFile]:
    """List the files of an archive, without its folders, in the order of its directory.

    Args:
        content: All of it; or a DICOM file, which is the only one then.
        max_bytes: Bytes of all files together, once inflated.
        most: How many entries to look at; None: all.

    Raises:
        NotAVolume: An archive of more than 65,534 files or 4 GiB.
        BrokenVolume: Truncated, corrupt or encrypted; or entries that overlap.
        TooLarge: The directory declares more bytes than allowed.
    """
    view = memoryview(content).cast("B")
    if not _is_archive(view):
        return [StoredFile(view, len(view))]
    files, spans, total = [], [], 0
    start, entries = _find_directory(view)
    at = start
    for _ in range(entries if most is None else min(most, entries)):
        if bytes(view[at : at + 4]) != DIRECTORY_MAGIC or at + DIRECTORY.size > len(view):
            raise _broken("a whole directory")
        fields = DIRECTORY.unpack_from(view, at)
        _, _, _, flags, method, _, _, crc, stored, size, *lengths, _, _, _, offset = fields
        name = bytes(view[at + DIRECTORY.size :][: lengths[0]])
        at += DIRECTORY.size + sum(lengths)
        _check_method(flags, method)
        if ZIP64 in (stored, size, offset):
            raise _zip64()
        total += size
        if total > max_bytes:
            raise TooLarge(
                f"expected at most {max_bytes:,} bytes once inflated, got an archive of {total:,} "
                "or more; the operator's limit is LANDMARKD_MAX_INFLATED_BYTES"
            )
        begin = _begin(view, offset)
        spans.append((offset, begin + stored))
        if size > (MAX_INFLATION * stored if method == DEFLATED else stored):
            raise _broken("entries no larger than what they are stored in")
        if not name.endswith(b"/"):
            data = view[begin : begin + stored]
            files.append(StoredFile(data, size, crc, deflated=method == DEFLATED))
    _check_spans(spans, start)
    return files


def _is_archive(view: memoryview) -> bool:
    return bytes(view[:4]) in (ENTRY_MAGIC, END_MAGIC)


def _find_directory(view: memoryview) -> tuple[int, int]:
    """Return where the directory of an archive begins, and how many entries it has."""
    tail = bytes(view[-END.size - COMMENT_BYTES :])
    found = tail.rfind(END_MAGIC)
    if found < 0 or found + END.size > len(tail):
        raise BrokenVolume("expected a whole ZIP archive, got a truncated one")
    *_, entries, size, start, _ = END.unpack_from(tail, found)
    if entries == ZIP64_ENTRIES or ZIP64 in (size, start):
        raise _zip64()
    if start + size > len(view) - len(tail) + found:
        raise _broken("its directory within one file")
    return start, entries


def _begin(view: memoryview, offset: int) -> int:
    """Return where the bytes of an entry begin, behind its own header."""
    if bytes(view[offset : offset + 4]) != ENTRY_MAGIC or offset + ENTRY.size > len(view):
        raise _broken("entries where its directory says")
    *_, name, extra = ENTRY.unpack_from(view, offset)
    return offset + ENTRY.size + int(name) + int(extra)


def _check_spans(spans: Iterable[tuple[int, int]], end: int) -> None:
    last = 0
    for first, behind in sorted(spans):
        if first < last or behind > end:
            raise _broken("entries that do not overlap")
        last = behind


def _check_method(flags: int, method: int) -> None:
    if flags & ENCRYPTED:
        raise BrokenVolume("expected a plain ZIP archive, got an encrypted one")
    if method not in (STORED, DEFLATED):
        raise BrokenVolume(f"expected ZIP entries stored or deflated, got method {method}")


def _broken(expected: str) -> BrokenVolume:
    return BrokenVolume(f"expected a ZIP archive with {expected}, got a corrupt one")


def _zip64() -> NotAVolume:
    return NotAVolume("expected a ZIP archive of less than 65,535 files and 4 GiB, got ZIP64")


class _CheckedFile(io.RawIOBase):
    """The inflated bytes of an entry, whose length and CRC are compared with its directory's."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._left = file.size
        self._crc = 0
        self._raw = (
            InflatedFile(file.content, igzip_lib.DECOMP_DEFLATE)
            if file.deflated
            else MemoryFile(file.content)
        )

    def readable(self) -> bool:
        return True

    def readinto(self, target: Buffer, /) -> int:
        view = memoryview(target)[: self._left]
        if not view:
            return 0
        count = self._raw.readinto(view)
        if not count:
            raise EOFError
        self._crc = isal_zlib.crc32(view[:count], self._crc)
        self._left -= count
        if not self._left and self._crc != self._file.crc:
            raise igzip.BadGzipFile
        return count
