"""FileStream: gzip or plain, truncated, corrupt, padded, in several members."""

import gzip
import zlib

import numpy as np
import pytest
from blake3 import blake3

from app.errors import BrokenVolume
from app.io.gzip_stream import CHUNK_BYTES, FileStream
from tests.support.cancelling import NobodyWaitsError, cancelled_after
from tests.support.scan_files import EMPTY_BLOCKS

PLAIN = bytes(range(256)) * 20_000
"""5 MB: several chunks, the last one short."""


def drain(stream: FileStream) -> bytes:
    parts = []
    while part := stream.read(CHUNK_BYTES - 3):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "body",
    [
        PLAIN,
        gzip.compress(PLAIN),
        gzip.compress(PLAIN[:100]) + gzip.compress(b"") + gzip.compress(PLAIN[100:]),
        gzip.compress(PLAIN[:9]) + bytes(7) + gzip.compress(PLAIN[9:]) + bytes(5000),
    ],
    ids=["plain", "gzip", "several members", "zero padding between and after members"],
)
def test_stream_yields_every_byte_once_and_hashes_it(body: bytes) -> None:
    stream = FileStream(body)
    assert drain(stream) == PLAIN
    assert stream.position == len(PLAIN)
    assert stream.max_bytes >= len(PLAIN)
    assert stream.hexdigest() == blake3(PLAIN).hexdigest()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("zipped", [False, True])
def test_body_is_read_from_memory_of_any_kind(
    kind: type[bytes | bytearray | memoryview], zipped: bool
) -> None:
    body = gzip.compress(PLAIN) if zipped else PLAIN
    assert drain(FileStream(kind(body))) == PLAIN


@pytest.mark.parametrize("zipped", [False, True])
def test_skipped_bytes_are_counted_and_hashed(zipped: bool) -> None:
    stream = FileStream(gzip.compress(PLAIN) if zipped else PLAIN)
    stream.skip(CHUNK_BYTES + 5)
    target = bytearray(1000)
    stream.fill(memoryview(target))
    assert bytes(target) == PLAIN[CHUNK_BYTES + 5 :][:1000]
    stream.skip(len(PLAIN) - stream.position)
    assert stream.hexdigest() == blake3(PLAIN).hexdigest()


@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_start_of_a_file_of_tiny_members_yields_what_it_holds(size: int) -> None:
    """Fewer bytes than any buffer: none but those that are asked for are inflated."""
    body = b"".join(gzip.compress(PLAIN[at : at + size]) for at in range(0, 4000, size))
    assert FileStream(body[: 4000 * 20 // size]).read(540) == PLAIN[:540]


@pytest.mark.parametrize("kept", [2, 5, 10, 18, 3000, -9, -8, -1])
def test_truncated_gzip_is_reported_as_truncated(kept: int) -> None:
    with pytest.raises(BrokenVolume, match="truncated"):
        drain(FileStream(gzip.compress(PLAIN)[:kept]))


@pytest.mark.parametrize(
    "at", [2, 40, -8, -4], ids=["method", "deflate codes", "checksum", "length"]
)
def test_corrupt_gzip_is_reported_as_corrupt(at: int) -> None:
    body = bytearray(gzip.compress(PLAIN))
    body[at] ^= 0xFF
    with pytest.raises(BrokenVolume, match="corrupt"):
        drain(FileStream(bytes(body)))


def test_bytes_after_the_last_member_that_are_no_member_are_corrupt() -> None:
    with pytest.raises(BrokenVolume, match="corrupt"):
        drain(FileStream(gzip.compress(PLAIN) + b"<html>not found</html>"))


def test_gzip_header_with_an_absurdly_long_name_is_refused() -> None:
    body = gzip.compress(PLAIN)
    named = body[:3] + b"\x08" + body[4:10] + b"n" * 600_000 + b"\0" + body[10:]
    with pytest.raises(BrokenVolume, match="corrupt"):
        drain(FileStream(named))


@pytest.mark.parametrize("zipped", [False, True])
def test_filling_past_the_end_says_where_the_file_ends(zipped: bool) -> None:
    stream = FileStream(gzip.compress(PLAIN) if zipped else PLAIN)
    stream.skip(1000)
    with pytest.raises(BrokenVolume, match=r"expected .* bytes at byte .*, got .*truncated"):
        stream.fill(memoryview(bytearray(len(PLAIN))))


def test_no_body_inflates_beyond_its_upper_bound() -> None:
    zeros = bytes(50 << 20)
    body = gzip.compress(zeros, 9)
    assert len(zeros) / len(body) > 1000
    assert FileStream(body).max_bytes >= len(zeros)


@pytest.mark.parametrize(
    ("content", "calls"),
    [(PLAIN, 2), (gzip.compress(PLAIN), 3)],  # Compressed bytes are asked for besides, once.
    ids=["plain", "gzip"],
)
def test_reading_ends_with_the_next_piece_once_nobody_waits(content: bytes, calls: int) -> None:
    stream = FileStream(content, cancelled_after(calls))
    with pytest.raises(NobodyWaitsError):
        stream.skip(len(PLAIN))
    assert stream.position == 2 * CHUNK_BYTES


def test_millions_of_empty_members_are_left_once_nobody_waits() -> None:
    empty, zeros = gzip.compress(b""), bytes(4 << 20)
    content = gzip.compress(zeros) + empty * (len(zeros) // len(empty)) + gzip.compress(b"tail")
    stream = FileStream(content, cancelled_after(10))
    stream.skip(len(zeros))
    with pytest.raises(NobodyWaitsError):
        stream.read(4)


def test_stream_of_empty_blocks_is_left_unread() -> None:
    """A megabyte of them takes a second, in which nothing asks whether anybody waits."""
    stream = FileStream(b"\x78\x01" + EMPTY_BLOCKS * (1 << 16))
    stream.start_inflating()
    with pytest.raises(BrokenVolume, match="expected a valid zlib stream, got a corrupt one"):
        stream.read(8)


@pytest.mark.parametrize("start", [b"", b"\0" * 100], ids=["whole file", "compressed voxels"])
def test_gzip_file_of_empty_blocks_is_left_unread(start: bytes) -> None:
    """Jobs have no deadline, and would have the threads that decode for minutes."""
    stream = FileStream(start + b"\x1f\x8b\x08" + bytes(7) + EMPTY_BLOCKS * (1 << 18))
    if start:
        stream.read(len(start))
        stream.start_inflating()
    with pytest.raises(BrokenVolume, match="expected a valid gzip stream, got a corrupt one"):
        stream.read(8)


@pytest.mark.parametrize("gzipped", [False, True])
def test_stream_that_was_flushed_often_is_read(gzipped: bool) -> None:
    data = np.random.default_rng(2).bytes(1 << 20)
    packer = zlib.compressobj(wbits=31 if gzipped else 15)
    parts = [packer.compress(data[at : at + 64]) + packer.flush(zlib.Z_SYNC_FLUSH)
             for at in range(0, len(data), 64)]  # fmt: skip
    stream = FileStream(b"".join([*parts, packer.flush()]))
    if not gzipped:
        stream.start_inflating()
    assert stream.read(len(data)) == data
