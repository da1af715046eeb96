"""A call with a body -> its file, read within its limits of size and time."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.types import Receive

from app.api.dependencies import Call
from app.api.upload.kinds import UploadKind, find_boundary, find_length
from app.api.upload.sinks import BufferSink, MultipartSink
from app.errors import ClientLeft, SlowUpload, TooLarge
from app.io import HEAD_BYTES, Content
from app.settings import Settings

GRACE_S: Final = 5.0
"""Before a body has to arrive at a rate: connections take time to gather speed."""

SLOW: Final = "the operator's limits are LANDMARKD_BODY_TIMEOUT_S and LANDMARKD_MIN_UPLOAD_RATE"
"""Ends what clients are told of a body that arrives too slowly."""

T = TypeVar("T")


async def read_upload(
    call: Call, kind: UploadKind, check_head: Callable[[Content], None] | None = None
) -> tuple[Content, ...]:
    """Read the body of a call, which is in work afterwards.

    Args:
        call: Its body has not been read; bytes that arrive, and the time they take, count there.
        kind: What is expected.
        check_head: Called once with the first ``HEAD_BYTES`` of the file, or with all of a shorter
            one; raises to refuse the file before the rest is received.

    Returns:
        The contents of all fields of the kind, that of the file first; the latter, of a body that
        is the file, in the buffer that it was received into.

    Raises:
        UnsupportedMediaType: The media type or content encoding is not accepted.
        TooLarge: The body is over the limit.
        QueueFull: The bodies of all requests are.
        SlowUpload: The body did not arrive in time.
        ClientLeft: The client closed the connection.
        BadParameter: A multipart body has no field of the expected name, or others.
        NotAVolume, NotAnArchive: The file is empty.
        RequestError: Content-Length is no number, or a multipart body is malformed; also whatever
            ``check_head`` raises.
    """
    admitted, settings = call.admitted, call.shared.settings
    max_bytes = kind.max_bytes or call.engine.max_body_bytes
    sink, more, limit_s = _make_sink(call, kind, max_bytes), True, settings.body_timeout_s
    start, began = time.perf_counter(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(None) as timeout:
            while more:
                timeout.reschedule(began + min(allowed_s(admitted.bytes, settings), limit_s))
                chunk, more = await _receive(call, max_bytes)
                sink.write(chunk)
                if check_head is not None and (head := sink.head(HEAD_BYTES)) is not None:
                    check_head(head)
                    check_head = None
    except TimeoutError:
        raise _too_slow(admitted.bytes, settings) from None
    contents = sink.close()
    if not contents[0]:
        raise kind.empty_error(f"expected {kind.name}, got 0 bytes")
    if check_head is not None:
        check_head(contents[0])
    admitted.start_work()
    call.record.bytes = len(contents[0])
    call.receive_ms = 1e3 * (time.perf_counter() - start)
    return contents


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine for as long as the client is connected.

    Args:
        receive: Of a request whose body has been read to its end.
        work: Cancelled when the client disconnects, and awaited until it has ended.

    Returns:
        The coroutine's result.

    Raises:
        ClientLeft: The client closed the connection before the work was done.
    """
    working = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft("expected the client to wait for its answer, but it left")
    finally:
        working.cancel()
        disconnect.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)
        del working, disconnect  # They hold errors, whose frames hold this one, and the request.


def _make_sink(call: Call, kind: UploadKind, max_bytes: int) -> BufferSink | MultipartSink:
    """Choose where a body goes, if its head is acceptable."""
    headers = call.request.headers
    length, boundary = find_length(headers), find_boundary(headers, kind)
    _check_size(length or 0, max_bytes)
    call.admitted.check_bytes(length or 0)
    if boundary is not None:
        return MultipartSink(boundary, kind)
    return BufferSink(max_bytes if length is None else length)


async def _receive(call: Call, max_bytes: int) -> tuple[bytes, bool]:
    """Wait for the next chunk of a body; return it, and whether there is more."""
    message = await call.request.receive()
    if message["type"] == "http.disconnect":
        raise ClientLeft(f"expected a whole body, got {call.admitted.bytes} bytes")
    chunk = message.get("body", b"")
    call.admitted.count_bytes(len(chunk))
    _check_size(call.admitted.bytes, max_bytes)
    return chunk, message.get("more_body", False)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise TooLarge(
            f"expected a body of at most {max_bytes} bytes, got {size}; the operator's limits are "
            "LANDMARKD_MAX_BODY_BYTES and 3/16 of LANDMARKD_MEMORY"
        )


def allowed_s(received: int, settings: Settings) -> float:
    """Return the time within which more than some bytes have to have arrived, at their rate."""
    rate = settings.min_upload_rate
    return max(GRACE_S, received / rate) if rate else math.inf


def _too_slow(received: int, settings: Settings) -> SlowUpload:
    expected = f"expected the whole body within {settings.body_timeout_s:g} s"
    if settings.min_upload_rate:
        expected += f", and {settings.min_upload_rate} bytes/s after {GRACE_S:g} s"
    return SlowUpload(f"{expected}; got {received} bytes; {SLOW}")


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
