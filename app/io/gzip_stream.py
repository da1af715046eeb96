"""bytes -> FileStream: the bytes of the uncompressed file, read forward once.

The first two bytes tell gzip from plain files. Either is read in chunks into buffers that the
caller has sized from the file's own header, so a decompression bomb inflates no further than that.
Formats that compress their voxels, but not their header, turn to inflating behind the header.
"""

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeVar, cast

from blake3 import blake3
from isal import igzip, igzip_lib, isal_zlib
from typing_extensions import Buffer

from app.errors import BrokenVolume

GZIP_MAGIC: Final = b"\x1f\x8b"

DEFLATE_ERROR: Final = cast("type[Exception]", isal_zlib.error)
"""isal's stubs declare it as an instance; it is the error of ``igzip_lib``, too."""

Content = bytes | bytearray | memoryview
"""A file as it was received."""

CHUNK_BYTES: Final = 1 << 20
"""Inflated and hashed at a time: long enough without the GIL, small enough for the cache."""

INPUT_BYTES: Final = 1 << 16
"""Given to an inflater at a time: it copies what it cannot use at once."""

MAX_INFLATION: Final = 1032
"""Largest ratio of deflate, which spends at least 2 bits on a copy of 258 bytes."""

MAX_DEFLATION: Final = 2
"""Largest ratio of a stream to what it holds, beyond INPUT_BYTES: those of compressors are at most
an eighth longer. Empty blocks, of which a megabyte takes a second, may fill one of any length."""

COMPRESSION: Final = 1
"""The fastest level; heatmaps, which are mostly zeros, it packs as well as others."""

Result = TypeVar("Result")


class FileStream:
    """The uncompressed bytes of an uploaded file.

    Reading releases the GIL, checks length and CRC of every gzip member, and hashes all bytes. The
    body is not copied.

    Args:
        content: The body as it was received, or the start of it.
        check_cancelled: Called before every piece; raises once nobody waits for the file any more.
        opened: The uncompressed bytes of the body, if it is neither plain nor gzip.

    Attributes:
        check_cancelled: As given.
        gzipped: Whether the body is gzip.
        max_bytes: Upper bound on the uncompressed size, however well the body is compressed.
        position: Number of uncompressed bytes that have been read.
    """

    def __init__(
        self,
        content: Content,
        check_cancelled: Callable[[], None] = lambda: None,
        opened: io.BufferedIOBase | None = None,
    ) -> None:
        self.check_cancelled = check_cancelled
        self._content = content
        self.gzipped = opened is None and bytes(content[:2]) == GZIP_MAGIC
        compressed = self.gzipped or opened is not None
        self.max_bytes = len(content) * (MAX_INFLATION if compressed else 1)
        self.position = 0
        self._ahead = b""
        self._coding = "deflate" if opened else "gzip"
        self._packed = _GzipInput(content, check_cancelled)
        self._stream = opened or (
            self._packed.open() if self.gzipped else io.BufferedReader(MemoryFile(content))
        )
        self._digest = blake3()

    def peek(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer only where the file ends, without reading them.

        Raises:
            BrokenVolume: The compressed stream is truncated or corrupt.
        """
        if size > len(self._ahead):
            self._ahead += self._inflate(size - len(self._ahead))
        return self._ahead[:size]

    def start_inflating(self) -> None:
        """Take the bytes from here on for compressed ones, gzip or zlib.

        Raises:
            BrokenVolume: So is the whole file.
        """
        if self.gzipped:
            raise BrokenVolume(
                "expected voxels compressed once, got a gzip file that is zipped again"
            )
        rest = memoryview(self._content)[self.position :]
        self._ahead = b""
        self.max_bytes = self.position + len(rest) * MAX_INFLATION
        if bytes(rest[:2]) == GZIP_MAGIC:
            self._packed = _GzipInput(rest, self.check_cancelled)
            self._coding, self._stream = "gzip", self._packed.open()
        else:
            self._coding = "zlib"
            self._stream = io.BufferedReader(InflatedFile(rest, igzip_lib.DECOMP_ZLIB))

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes, fewer only where the file ends, and inflate none after them.

        Raises:
            BrokenVolume: The gzip stream is truncated or corrupt.
        """
        data = self.peek(size)
        self._ahead = self._ahead[len(data) :]
        self._digest.update(data)
        self.position += len(data)
        return data

    def fill(self, target: memoryview) -> None:
        """Fill ``target``, a view of bytes, with the next bytes.

        Raises:
            BrokenVolume: The file ends before, or its gzip stream is truncated or corrupt.
        """
        ahead = self.read(min(len(target), len(self._ahead)))
        target[: len(ahead)] = ahead
        for start in range(len(ahead), len(target), CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            count = self._take(partial(self._stream.readinto, chunk), len(chunk))
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

    def _inflate(self, size: int) -> bytes:
        """Take ``size`` bytes from the stream, fewer where it ends."""
        data = bytearray()
        # Not readinto, whose buffer takes 8 KiB: the start of a file may hold fewer.
        while part := self._take(partial(self._stream.read1, size - len(data)), size):
            data += part
        return bytes(data)

    def _take(self, read: Callable[[], Result], size: int) -> Result:
        """Call a read of up to ``size`` bytes, with errors that say what is wrong with the file."""
        self.check_cancelled()
        self._packed.limit(self.position + len(self._ahead) + size)
        try:
            return read()
        except EOFError as error:
            raise BrokenVolume(
                f"expected a whole {self._coding} stream, got a truncated one"
            ) from error
        except (igzip.BadGzipFile, OverflowError, DEFLATE_ERROR) as error:
            # In turn: header, CRC or length of a member, or a stream that is longer than any
            # compressor makes it; a gzip header over 512 KiB; deflate codes.
            raise BrokenVolume(
                f"expected a valid {self._coding} stream, got a corrupt one"
            ) from error


class InflatedFile(io.RawIOBase):
    """The bytes of a compressed stream that has no header of gzip.

    Args:
        content: The stream; what follows it is ignored.
        coding: ``DECOMP_ZLIB`` or ``DECOMP_DEFLATE`` of ``igzip_lib``.
    """

    def __init__(self, content: Content, coding: int) -> None:
        self._rest = memoryview(content)
        self._spare = INPUT_BYTES
        self._inflater = igzip_lib.IgzipDecompressor(coding)

    def readable(self) -> bool:
        """Say that it is read."""
        return True

    def readinto(self, target: Buffer, /) -> int:
        """Inflate the next bytes; none where the stream ends.

        Raises:
            EOFError: The stream is cut short.
            BadGzipFile: It is longer than any compressor makes it.
        """
        view = memoryview(target)
        data = b""
        while view and not data and not self._inflater.eof:
            piece = self._rest[:INPUT_BYTES] if self._inflater.needs_input else self._rest[:0]
            if self._inflater.needs_input and not piece:
                raise EOFError
            if piece and self._spare < 0:
                raise igzip.BadGzipFile
            self._rest = self._rest[len(piece) :]
            data = self._inflater.decompress(piece, len(view))
            self._spare += MAX_DEFLATION * len(data) - len(piece)
        view[: len(data)] = data
        return len(data)


def write_gzip(pieces: Iterable[Buffer]) -> bytes:
    """Compress the pieces of a file, at the fastest level.

    The time of writing is left out. Do not count on the same bytes, though: of the same pieces,
    ISA-L was seen to make two files under load, of one length, which inflate alike.
    """
    file = io.BytesIO()
    stream: io.BufferedIOBase = igzip.IGzipFile("", "wb", COMPRESSION, file, mtime=0)
    with stream:
        stream.writelines(pieces)
    return file.getvalue()


class MemoryFile(io.RawIOBase):
    """Bytes as a file; ``io.BytesIO`` copies what is not ``bytes``."""

    def __init__(self, content: Content) -> None:
        self._content = memoryview(content)
        self._position = 0

    def readable(self) -> bool:
        """Say that it is read."""
        return True

    def seekable(self) -> bool:
        """Say that it is read in any order."""
        return True

    @property
    def left(self) -> int:
        """Number of bytes behind the position."""
        return max(0, len(self._content) - self._position)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position from the start, the present one or the end; gives it from the start."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, target: Buffer, /) -> int:
        """Copy the next bytes; none where they end."""
        view = memoryview(target)
        chunk = self._content[self._position : self._position + len(view)]
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)


class _GzipInput(MemoryFile):
    """The bytes of a gzip file, of which no more are read than what is asked for can take.

    Args:
        content: The bytes.
        check_cancelled: Called before every read: one byte may lie behind a long part that holds
            nothing.
    """

    def __init__(self, content: Content, check_cancelled: Callable[[], None]) -> None:
        super().__init__(content)
        self._check_cancelled = check_cancelled
        self._end = 0

    def open(self) -> io.BufferedIOBase:
        """Read what is compressed in it."""
        return igzip.IGzipFile(fileobj=self, mode="rb")

    def limit(self, size: int) -> None:
        """Read no more than ``size`` uncompressed bytes from the start can take."""
        self._end = MAX_DEFLATION * size + INPUT_BYTES

    def readinto(self, target: Buffer, /) -> int:
        """Copy the next bytes; none where they end.

        Raises:
            BadGzipFile: The stream is longer than any compressor makes it.
        """
        self._check_cancelled()
        if self._position > self._end and self.left:
            raise igzip.BadGzipFile
        return super().readinto(target)
