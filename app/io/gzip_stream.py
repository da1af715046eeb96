"""bytes -> FileStream: the bytes of the uncompressed file, read forward once, within a bound.

A body is gzip or plain, told apart by its first two bytes. Either is read in pieces into memory
that the caller has sized from the file's own header, so a bomb inflates no further than that.
"""

import io
from typing import Final

from blake3 import blake3
from isal import igzip, isal_zlib

from app.errors import BrokenVolume

GZIP_MAGIC: Final = b"\x1f\x8b"

Content = bytes | bytearray | memoryview
"""A file as it was received."""

PIECE_BYTES: Final = 1 << 20
"""Bytes inflated and hashed at a time: long with the GIL released, yet still in cache."""

MOST_INFLATION: Final = 1032
"""Deflate spends 2 bits or more on a copy of 258 bytes, so no byte becomes more than this."""


class FileStream:
    """The uncompressed bytes of an uploaded file.

    Reading releases the GIL, checks length and CRC of every gzip member, and hashes what goes by.
    The body is read in place.

    Attributes:
        gzipped: Whether the body is gzip.
        most_bytes: More than this the body cannot hold, however well it is compressed.
        position: How many uncompressed bytes have been read.
    """

    def __init__(self, content: Content) -> None:
        """Args: content, the body as it came, or the start of it."""
        body = _InPlace(content)
        self.gzipped = bytes(content[:2]) == GZIP_MAGIC
        self.most_bytes = len(content) * (MOST_INFLATION if self.gzipped else 1)
        self.position = 0
        self._stream: io.RawIOBase | io.BufferedIOBase = body
        if self.gzipped:
            self._stream = igzip.IGzipFile(fileobj=body, mode="rb")
        self._digest = blake3()

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes, fewer only where the file ends.

        Raises:
            BrokenVolume: The gzip stream is truncated or corrupt.
        """
        target = bytearray(size)
        return bytes(target[: self._fill_some(memoryview(target))])

    def fill(self, target: memoryview) -> None:
        """Fill ``target``, a view of bytes, with the bytes that come next.

        Raises:
            BrokenVolume: The file ends before, or its gzip stream is truncated or corrupt.
        """
        for start in range(0, len(target), PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES]
            count = self._fill_some(piece)
            if count < len(piece):
                raise BrokenVolume(
                    f"expected {len(piece):,} bytes at byte {self.position - count:,} of the "
                    f"uncompressed file, got {count:,}: it is truncated"
                )

    def skip(self, size: int) -> None:
        """Pass over ``size`` bytes, which are hashed too.

        Raises:
            BrokenVolume: The file ends before, or its gzip stream is truncated or corrupt.
        """
        scratch = memoryview(bytearray(min(size, PIECE_BYTES)))
        for start in range(0, size, PIECE_BYTES):
            self.fill(scratch[: size - start])

    def hexdigest(self) -> str:
        """Return the BLAKE3 digest of all bytes read so far, hex."""
        return self._digest.hexdigest()

    def _fill_some(self, target: memoryview) -> int:
        """Read into ``target`` until it is full or the file ends; return how many bytes came."""
        try:
            count = self._stream.readinto(target) or 0
        except EOFError as error:
            raise BrokenVolume("expected a whole gzip stream, got a truncated one") from error
        except (igzip.BadGzipFile, OverflowError, isal_zlib.error) as error:  # type: ignore[misc]
            # In turn: header, CRC or length of a member; a gzip header over 512 KiB; deflate codes.
            raise BrokenVolume("expected a sound gzip stream, got a corrupt one") from error
        self._digest.update(target[:count])
        self.position += count
        return count


class _InPlace(io.RawIOBase):
    """Bytes as a file; ``io.BytesIO`` copies what is not ``bytes``."""

    def __init__(self, content: Content) -> None:
        self._rest = memoryview(content)

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        piece = self._rest[: len(target)]
        target[: len(piece)] = piece
        self._rest = self._rest[len(piece) :]
        return len(piece)
