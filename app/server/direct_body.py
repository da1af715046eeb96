"""Receives the rest of a request's body directly into a buffer of the application.

uvicorn passes a body on in chunks of 256 KiB, copies each four times, and pauses and resumes the
socket for each. If the length of a body is known, the application may instead provide a buffer (see
``app.api.upload.direct``). The connection then gets a protocol that receives into that buffer, and
returns to uvicorn's with the last byte of the body::

    HttpProtocol ── FillBody ──► BodyReceiver ── last byte ──► HttpProtocol
"""

import asyncio
import weakref
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DISCARD_BYTES: Final = 64 << 10
"""Buffer for the rest of a body that is no longer awaited."""


@runtime_checkable
class HttpConnection(Protocol):
    """The protocol that has the connection before a body is received directly, and afterwards.

    Attributes:
        loop: The event loop.
        remaining: Bytes of the current body that have not arrived.
    """

    loop: asyncio.AbstractEventLoop
    remaining: int

    def check_body(self, cycle: RequestResponseCycle) -> None:
        """Raise an error if the body of a request will not be completed."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Give the connection to a protocol."""

    def end_direct_body(self, cycle: RequestResponseCycle) -> None:
        """Continue after the last byte of a body."""

    def on_discard(self) -> None:
        """Note that bytes have arrived that are not awaited."""

    def connection_lost(self, exc: Exception | None) -> None:
        """As of ``asyncio.Protocol``."""

    def pause_writing(self) -> None:
        """As of ``asyncio.Protocol``."""

    def resume_writing(self) -> None:
        """As of ``asyncio.Protocol``."""


class DirectBody:
    """``FillBody`` of one request.

    Protocol and cycle hold it through the request's scope. Its references to them are weak, so that
    they and the body are freed at once, not by the next garbage collection.
    """

    def __init__(self, http: HttpConnection, cycle: RequestResponseCycle) -> None:
        self._http = weakref.ref(http)
        self._cycle = weakref.ref(cycle)

    async def __call__(self, rest: memoryview, count: Callable[[int], None]) -> None:
        """Receive the rest of the body; see ``FillBody``."""
        http, cycle = self._http(), self._cycle()
        if http is None or cycle is None:
            raise ClientDisconnect
        received = cycle.body
        # Once the body is complete, the count is already that of the next request.
        remaining = http.remaining if cycle.more_body else 0
        if len(rest) != len(received) + remaining:
            expected = len(received) + remaining
            raise ValueError(f"expected a buffer of {expected} bytes, got {len(rest)}")
        http.check_body(cycle)
        rest[: len(received)] = received
        cycle.body = received[:0]
        count(len(received))
        if remaining:
            receiver = BodyReceiver(http, cycle, rest[len(received) :], count)
            http.set_protocol(receiver)
            await receiver.wait()


class BodyReceiver(asyncio.BufferedProtocol):
    """Protocol of the connection while the rest of one body arrives.

    If the body is no longer awaited, its rest is discarded, so that the next request is found.

    Args:
        http: The protocol that has the connection before and afterwards.
        cycle: The request.
        rest: The buffer.
        count: Called with the number of bytes each time some have arrived.
    """

    def __init__(
        self,
        http: HttpConnection,
        cycle: RequestResponseCycle,
        rest: memoryview,
        count: Callable[[int], None],
    ) -> None:
        self._http = http
        self._cycle = cycle
        self._buffer = rest
        self._remaining = len(rest)
        self._count = count
        # An exception as its result would hold the buffer by its traceback, in a cycle with this
        # object, until the next garbage collection.
        self._done: asyncio.Future[None] = http.loop.create_future()

    async def wait(self) -> None:
        """Wait until the body is complete; the buffer is released even if this is cancelled."""
        try:
            await self._done
            if self._remaining:
                self._http.check_body(self._cycle)
                raise ClientDisconnect
        finally:
            # The transport may keep a reference to this protocol for as long as it lives.
            self._buffer = memoryview(bytearray(min(self._remaining, DISCARD_BYTES)))

    def stop(self) -> None:
        """Wake up who waits for the body, which will not be completed."""
        if not self._done.done():
            self._done.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        del sizehint
        return self._buffer[: self._remaining]

    def buffer_updated(self, nbytes: int) -> None:
        """Count bytes that have arrived in the buffer."""
        self._remaining -= nbytes
        if self._done.done():
            self._http.on_discard()
        else:
            self._buffer = self._buffer[nbytes:]
            self._count(nbytes)
        if self._remaining == 0:
            self._http.end_direct_body(self._cycle)
            self.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify uvicorn and the application."""
        self._http.connection_lost(exc)
        self.stop()

    def pause_writing(self) -> None:
        """Notify uvicorn, which may be sending a response already."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Notify uvicorn."""
        self._http.resume_writing()
