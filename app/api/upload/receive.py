"""UploadPlan -> Upload: a request's body, read within its limits of size and time."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from app.api.upload.plan import UploadPlan
from app.api.upload.sinks import Sink, make_sink
from app.errors import ClientLeft, SlowUpload, TooLarge
from app.io import HEAD_BYTES, Content
from app.settings import Settings

GRACE_S: Final = 5.0
"""Before a body has to arrive at a rate: connections take time to gather speed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of a body.

    Attributes:
        max_bytes: Largest allowed body, framing included.
        timeout_s: Time within which all of it has to arrive.
        min_rate: Bytes per second at which it has to arrive on average, after ``GRACE_S``.
    """

    max_bytes: int
    timeout_s: float
    min_rate: int = 0

    @classmethod
    def of(cls, settings: Settings, max_bytes: int | None = None) -> "UploadLimits":
        """Take the limits of the settings, the first one lowered if there is a lower one."""
        most = settings.max_body_bytes if max_bytes is None else max_bytes
        return cls(most, settings.body_timeout_s, settings.min_upload_rate)


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that has arrived.

    Attributes:
        content: Its bytes; for a raw body of known length the buffer it was received into.
        receive_ms: Time it took to arrive.
    """

    content: Content
    receive_ms: float


async def read_upload(
    request: Request,
    plan: UploadPlan,
    limits: UploadLimits,
    check_head: Callable[[Content], None] | None = None,
) -> Upload:
    """Read a request's body.

    Args:
        request: A request whose body has not been read.
        plan: Made from its headers.
        limits: Of the body.
        check_head: Called once with the first ``HEAD_BYTES`` of the file, or with all of a shorter
            one; raises to refuse the file before the rest is received.

    Returns:
        The uploaded file.

    Raises:
        TooLarge: The body is over the limit.
        SlowUpload: The body did not arrive in time.
        ClientLeft: The client closed the connection.
        BadParameter: A multipart body has no field of the expected name, or others.
        NotAVolume, NotAnArchive: The file is empty.
        RequestError: A multipart body is malformed; also whatever ``check_head`` raises.
    """
    start = time.perf_counter()
    sink = make_sink(plan)
    timeout = asyncio.timeout(limits.timeout_s)
    counter = _ByteCounter(limits, timeout)
    try:
        async with timeout:
            counter.add(0)
            checked = await _receive(request, sink, counter, check_head)
    except TimeoutError:
        expected = f"expected the whole body within {limits.timeout_s:g} s"
        if limits.min_rate:
            expected += f", and {limits.min_rate} bytes/s after {GRACE_S:g} s"
        raise SlowUpload(f"{expected}; got {counter.total} bytes") from None
    except ClientDisconnect:
        raise ClientLeft(f"expected a whole body, got {counter.total} bytes") from None
    content = sink.close()
    if not content:
        raise plan.kind.empty_error(f"expected {plan.kind.name}, got 0 bytes")
    if check_head is not None and not checked:
        check_head(content)
    return Upload(content, 1e3 * (time.perf_counter() - start))


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


async def _receive(
    request: Request,
    sink: Sink,
    counter: "_ByteCounter",
    check_head: Callable[[Content], None] | None,
) -> bool:
    """Fill a sink; return whether ``check_head`` has been called."""
    more, checked = True, False
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        counter.add(len(chunk))
        sink.write(chunk)
        if check_head is not None and not checked:
            head = sink.head(HEAD_BYTES)
            if head is not None:
                check_head(head)
                checked = True
    return checked


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _ByteCounter:
    """Counts the bytes of a body, and extends its time limit by what has arrived."""

    def __init__(self, limits: UploadLimits, timeout: asyncio.Timeout) -> None:
        self._limits = limits
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self.total = 0

    def add(self, count: int) -> None:
        limits = self._limits
        self.total += count
        if self.total > limits.max_bytes:
            raise TooLarge(
                f"expected a body of at most {limits.max_bytes} bytes, got {self.total} and more"
            )
        if limits.min_rate:
            allowed_s = max(GRACE_S, self.total / limits.min_rate)
            self._timeout.reschedule(self._start + min(allowed_s, limits.timeout_s))
