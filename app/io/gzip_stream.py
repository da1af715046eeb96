"""bytes -> FileStream: the bytes of the uncompressed file, read forward once.

The first two bytes tell gzip from plain files. Either is read in chunks into buffers that the
caller has sized from the file's own header, so a decompression bomb inflates no further than that.
"""

import io
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar, cast

from blake3 import blake3
from isal import igzip, isal_zlib
from typing_extensions import Buffer

from app.errors import BrokenVolume

GZIP_MAGIC: Final = b"\x1f\x8b"

DEFLATE_ERROR: Final = cast("type[Exception]", isal_zlib.error)
"""isal's stubs declare it as an instance."""

Content = bytes | bytearray | memoryview
"""A file as it was received."""

CHUNK_BYTES: Final = 1 << 20
"""Inflated and hashed at a time: long enough without the GIL, small enough for the cache."""

MAX_INFLATION: Final = 1032
"""Largest ratio of deflate, which spends at least 2 bits on a copy of 258 bytes."""

Result = TypeVar("Result")


class FileStream:
    """The uncompressed bytes of an uploaded file.

    Reading releases the GIL, checks length and CRC of every gzip member, and hashes all bytes. The
    body is not copied.

    Args:
        content: The body as it was received, or the start of it.
        check_cancelled: Called before every piece; raises once nobody waits for the file any more.

    Attributes:
        gzipped: Whether the body is gzip.
        max_bytes: Upper bound on the uncompressed size, however well the body is compressed.
        position: Number of uncompressed bytes that have been read.
    """

    def __init__(
        self, content: Content, check_cancelled: Callable[[], None] = lambda: None
    ) -> None:
        self._check_cancelled = check_cancelled
        body = _MemoryFile(content)
        self.gzipped = bytes(content[:2]) == GZIP_MAGIC
        self.max_bytes = len(content) * (MAX_INFLATION if self.gzipped else 1)
        self.position = 0
        self._stream: io.BufferedIOBase = (
            igzip.IGzipFile(fileobj=body, mode="rb") if self.gzipped else io.BufferedReader(body)
        )
        self._digest = blake3()

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes, fewer only where the file ends, and inflate none after them.

        Raises:
            BrokenVolume: The gzip stream is truncated or corrupt.
        """
        data = bytearray()
        # Not readinto, whose buffer takes 8 KiB: the start of a file may hold fewer.
        while part := self._take(partial(self._stream.read1, size - len(data))):
            data += part
        self._digest.update(data)
        self.position += len(data)
        return bytes(data)

    def fill(self, target: memoryview) -> None:
        """Fill ``target``, a view of bytes, with the next bytes.

        Raises:
            BrokenVolume: The file ends before, or its gzip stream is truncated or corrupt.
        """
        for start in range(0, len(target), CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            count = self._take(partial(self._stream.readinto, chunk))
            self._digest.update(chunk[:count])
            self.position += count
            if count < len(chunk):
                raise BrokenVolume(
                    f"expected {len(chunk):,} bytes at byte {self.position - count:,} of the "
                    f"uncompressed file, got {count:,}: it is truncated"
                )

    def skip(self, size: int) -> None:
        """Skip ``size`` bytes, which are hashed, too.

        Raises:
            BrokenVolume: The file ends before, or its gzip stream is truncated or corrupt.
        """
        scratch = memoryview(bytearray(min(size, CHUNK_BYTES)))
        for start in range(0, size, CHUNK_BYTES):
            self.fill(scratch[: size - start])

    def hexdigest(self) -> str:
        """Return the BLAKE3 digest of all bytes read so far, hex."""
        return self._digest.hexdigest()

    def _take(self, read: Callable[[], Result]) -> Result:
        """Call a read, with errors that say what is wrong with the file."""
        self._check_cancelled()
        try:
            return read()
        except EOFError as error:
            raise BrokenVolume("expected a whole gzip stream, got a truncated one") from error
        except (igzip.BadGzipFile, OverflowError, DEFLATE_ERROR) as error:
            # In turn: header, CRC or length of a member; a gzip header over 512 KiB; deflate codes.
            raise BrokenVolume("expected a valid gzip stream, got a corrupt one") from error


class _MemoryFile(io.RawIOBase):
    """Bytes as a file; ``io.BytesIO`` copies what is not ``bytes``."""

    def __init__(self, content: Content) -> None:
        self._rest = memoryview(content)

    def readable(self) -> bool:
        return True

    def readinto(self, target: Buffer, /) -> int:
        view = memoryview(target)
        chunk = self._rest[: len(view)]
        view[: len(chunk)] = chunk
        self._rest = self._rest[len(chunk) :]
        return len(chunk)
