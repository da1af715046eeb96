"""uvicorn's HTTP/1.1 protocol, which can receive a body directly into the application's buffer.

uvicorn passes a body on in chunks of 256 KiB, copies each four times, and pauses and resumes the
socket for each. If the length of a body is known, the application may instead provide a buffer (see
``app.api.upload.direct``). The connection then gets a protocol that receives into that buffer, and
returns to uvicorn's with the last byte of the body::

    DirectBodyProtocol ── fill ──► _BodyReceiver ── last byte ──► DirectBodyProtocol

It extends a private class of uvicorn, so ``pyproject.toml`` bounds uvicorn's version.
"""

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, cast

import httptools
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.api import BODY_EXTENSION

DISCARD_BYTES: Final = 64 << 10
"""Buffer for the rest of a body that is no longer awaited."""


class DirectBodyProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, which offers ``FillBody`` if the length of a body is known.

    The parser never sees bytes that were received directly, so the next request gets a new parser.
    """

    _remaining = 0  # Bytes of the current body that have not arrived.
    _closing = False  # The connection closes after the current response: further bytes are ignored.

    def data_received(self, data: bytes) -> None:
        """Pass bytes to uvicorn's parser."""
        if not self._closing:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        """Offer ``FillBody`` to the application, which does not run yet."""
        super().on_headers_complete()
        headers = dict(self.headers)
        # The parser has refused several lengths, invalid ones, and both kinds of framing at once.
        if b"content-length" in headers and b"transfer-encoding" not in headers:
            self._remaining = int(headers[b"content-length"])
            offered = {BODY_EXTENSION: _Offer(self, self.cycle)}
            self.scope["extensions"] = cast("dict[str, dict[object, object]]", offered)

    def on_body(self, body: bytes) -> None:
        """Count what came through the parser."""
        self._remaining -= len(body)
        super().on_body(body)

    async def fill(
        self, cycle: RequestResponseCycle, rest: memoryview, count: Callable[[int], None]
    ) -> None:
        """Receive the rest of a request's body; see ``FillBody``."""
        received = cycle.body
        # Once the body is complete, the count is already that of the next request.
        remaining = self._remaining if cycle.more_body else 0
        if len(rest) != len(received) + remaining:
            expected = len(received) + remaining
            raise ValueError(f"expected a buffer of {expected} bytes, got {len(rest)}")
        if cycle.disconnected:
            raise ClientDisconnect
        rest[: len(received)] = received
        cycle.body = received[:0]
        count(len(received))
        if remaining:
            on_end = partial(self._end_body, cycle)
            receiver = _BodyReceiver(self, on_end, rest[len(received) :], count)
            self._set_protocol(receiver)
            await receiver.wait()

    def _end_body(self, cycle: RequestResponseCycle) -> None:
        """Continue after the last byte of a body."""
        self._remaining = 0
        self._closing = not cycle.keep_alive
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # As uvicorn does; httptools has it since 0.6.3.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        cycle.more_body = False
        self._set_protocol(self)

    def _set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        # Not every version of every loop accepts another kind of protocol while it reads.
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()


class _Offer:
    """``FillBody`` of one request.

    Protocol and cycle hold it through the request's scope. Its references to them are weak, so that
    they and the body are freed at once, not by the next garbage collection.
    """

    def __init__(self, http: DirectBodyProtocol, cycle: RequestResponseCycle) -> None:
        self._http = weakref.ref(http)
        self._cycle = weakref.ref(cycle)

    async def __call__(self, rest: memoryview, count: Callable[[int], None]) -> None:
        http, cycle = self._http(), self._cycle()
        if http is None or cycle is None:
            raise ClientDisconnect
        await http.fill(cycle, rest, count)


class _BodyReceiver(asyncio.BufferedProtocol):
    """Protocol of the connection while the rest of one body arrives.

    If the body is no longer awaited, its rest is discarded, so that the next request is found.
    """

    def __init__(
        self,
        http: DirectBodyProtocol,
        on_end: Callable[[], None],
        rest: memoryview,
        count: Callable[[int], None],
    ) -> None:
        self._http = http
        self._on_end = on_end
        self._buffer = rest
        self._remaining = len(rest)
        self._count = count
        # Whether the body is complete. An exception instead of False would hold the buffer by its
        # traceback, in a cycle with this object, until the next garbage collection.
        self._done: asyncio.Future[bool] = http.loop.create_future()

    async def wait(self) -> None:
        """Wait until the body is complete; the buffer is released even if this is cancelled."""
        try:
            if not await self._done:
                raise ClientDisconnect
        finally:
            # The transport may keep a reference to this protocol for as long as it lives.
            self._buffer = memoryview(bytearray(min(self._remaining, DISCARD_BYTES)))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        del sizehint
        return self._buffer[: self._remaining]

    def buffer_updated(self, nbytes: int) -> None:
        """Count bytes that have arrived in the buffer."""
        self._remaining -= nbytes
        if not self._done.done():
            self._buffer = self._buffer[nbytes:]
            self._count(nbytes)
        if self._remaining == 0:
            self._on_end()
            if not self._done.done():
                self._done.set_result(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the application and uvicorn."""
        if not self._done.done():
            self._done.set_result(False)
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        """Notify uvicorn, which may be sending a response already."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Notify uvicorn."""
        self._http.resume_writing()
