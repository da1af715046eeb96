"""UploadPlan -> Upload: a request's body, read within its limits of size and time."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from app.api.upload.plan import UploadPlan
from app.api.upload.sinks import make_sink
from app.engine import AdmittedRequest
from app.errors import ClientLeft, SlowUpload
from app.io import HEAD_BYTES, Content
from app.settings import Settings

GRACE_S: Final = 5.0
"""Before a body has to arrive at a rate: connections take time to gather speed."""

SLOW: Final = "the operator's limits are LANDMARKD_BODY_TIMEOUT_S and LANDMARKD_MIN_UPLOAD_RATE"
"""Ends what clients are told of a body that arrives too slowly."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that has arrived.

    Attributes:
        content: Its bytes; for a raw body of known length the buffer it was received into.
        receive_ms: Time it took to arrive.
        second: Content of the second field of a form, where there is one.
    """

    content: Content
    receive_ms: float
    second: Content = b""


async def read_upload(
    request: Request,
    plan: UploadPlan,
    settings: Settings,
    admitted: AdmittedRequest,
    check_head: Callable[[Content], None] | None = None,
) -> Upload:
    """Read a request's body.

    Args:
        request: A request whose body has not been read.
        plan: Made from its headers.
        settings: How long it may take.
        admitted: The same request; the body's bytes are counted there, then it is in work.
        check_head: Called once with the first ``HEAD_BYTES`` of the file, or with all of a shorter
            one; raises to refuse the file before the rest is received.

    Raises:
        TooLarge: The body is over the limit.
        QueueFull: The bodies of all requests are.
        SlowUpload: The body did not arrive in time.
        ClientLeft: The client closed the connection.
        BadParameter: A multipart body has no field of the expected name, or others.
        NotAVolume, NotAnArchive: The file is empty.
        RequestError: A multipart body is malformed; also whatever ``check_head`` raises.
    """
    admitted.check_bytes(plan.length or 0)
    start, began = time.perf_counter(), asyncio.get_running_loop().time()
    sink, more, limit_s = make_sink(plan), True, settings.body_timeout_s
    try:
        async with asyncio.timeout(None) as timeout:
            while more:
                timeout.reschedule(began + min(allowed_s(admitted.bytes, settings), limit_s))
                chunk, more = await _receive(request, plan, admitted)
                sink.write(chunk)
                if check_head is not None and (head := sink.head(HEAD_BYTES)) is not None:
                    check_head(head)
                    check_head = None
    except TimeoutError:
        raise _too_slow(admitted.bytes, settings) from None
    content, *second = sink.close()
    if not content:
        raise plan.kind.empty_error(f"expected {plan.kind.name}, got 0 bytes")
    if check_head is not None:
        check_head(content)
    admitted.start_work()
    return Upload(content, 1e3 * (time.perf_counter() - start), *second)


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


async def _receive(
    request: Request, plan: UploadPlan, admitted: AdmittedRequest
) -> tuple[bytes, bool]:
    """Wait for the next chunk of a body; return it, and whether there is more."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientLeft(f"expected a whole body, got {admitted.bytes} bytes")
    chunk = message.get("body", b"")
    admitted.count_bytes(len(chunk))
    plan.check_size(admitted.bytes)
    return chunk, message.get("more_body", False)


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
