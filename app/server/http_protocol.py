"""socket -> the rest of a request's body, straight into memory of whoever wants it.

uvicorn hands a body on in pieces of 256 KiB, each copied four times, and stops and starts the
socket for every one. Where a handler wants all of a large body, and its length is known, the
connection is given to a protocol whose buffer is the handler's own, and handed back with the body's
last byte::

    DirectBodyProtocol ── fill ──► _Filler ── last byte ──► DirectBodyProtocol
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

from app.api import EXTENSION

DROPPED_BYTES: Final = 64 << 10
"""Received at a time of a body that nobody waits for any more."""


class DirectBodyProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, which offers ``FillBody`` where the length of a body is known.

    The parser is not shown bytes that did not come through it: the next request gets a new one.
    """

    _left = 0  # Bytes of the body at hand that have not come.
    _deaf = False  # The connection closes with the answer at hand: what comes is no request.

    def data_received(self, data: bytes) -> None:
        """Take bytes for uvicorn's parser."""
        if not self._deaf:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        """Offer ``FillBody`` to the handler, which does not run yet."""
        super().on_headers_complete()
        headers = dict(self.headers)
        # The parser has refused more than one length, odd ones, and both kinds of framing at once.
        if b"content-length" in headers and b"transfer-encoding" not in headers:
            self._left = int(headers[b"content-length"])
            offered = {EXTENSION: _Offer(self, self.cycle)}
            self.scope["extensions"] = cast("dict[str, dict[object, object]]", offered)

    def on_body(self, body: bytes) -> None:
        """Count what came through the parser."""
        self._left -= len(body)
        super().on_body(body)

    async def fill(
        self, cycle: RequestResponseCycle, rest: memoryview, count: Callable[[int], None]
    ) -> None:
        """Receive the rest of a request's body; see ``FillBody``."""
        came = cycle.body
        # Once all has come, what is left is that of the next request.
        left = self._left if cycle.more_body else 0
        if len(rest) != len(came) + left:
            raise ValueError(f"expected room for {len(came) + left} bytes, got {len(rest)}")
        if cycle.disconnected:
            raise ClientDisconnect
        rest[: len(came)] = came
        cycle.body = came[:0]
        count(len(came))
        if left:
            filler = _Filler(self, partial(self._end, cycle), rest[len(came) :], count)
            self._hand_to(filler)
            await filler.wait()

    def _end(self, cycle: RequestResponseCycle) -> None:
        """Go on after the last byte of a body."""
        self._left = 0
        self._deaf = not cycle.keep_alive
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # As uvicorn does; httptools knows it from 0.6.3 on.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        cycle.more_body = False
        self._hand_to(self)

    def _hand_to(self, protocol: asyncio.BaseProtocol) -> None:
        # Not every version of every loop takes another kind of protocol while it reads.
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()


class _Offer:
    """``FillBody`` of one request.

    Those whom it refers to hold it, by the request's scope. If it held them, too, they and what
    has come of a body would stay until garbage is collected.
    """

    def __init__(self, http: DirectBodyProtocol, cycle: RequestResponseCycle) -> None:
        self._http = weakref.ref(http)
        self._cycle = weakref.ref(cycle)

    async def __call__(self, rest: memoryview, count: Callable[[int], None]) -> None:
        http, cycle = self._http(), self._cycle()
        if http is None or cycle is None:
            raise ClientDisconnect
        await http.fill(cycle, rest, count)


class _Filler(asyncio.BufferedProtocol):
    """Has the connection while the rest of one body comes.

    If nobody waits for it any more, what comes is dropped, so that the next request is found.
    """

    def __init__(
        self,
        http: DirectBodyProtocol,
        end: Callable[[], None],
        rest: memoryview,
        count: Callable[[int], None],
    ) -> None:
        self._http = http
        self._end = end
        self._room = rest
        self._left = len(rest)
        self._count = count
        # Whether all has come. Not an exception, which by its traceback would hold the memory, and
        # be held by this, until garbage is collected.
        self._done: asyncio.Future[bool] = http.loop.create_future()

    async def wait(self) -> None:
        """Wait until all has come; a caller that is cancelled gives its memory back."""
        try:
            if not await self._done:
                raise ClientDisconnect
        finally:
            # The transport may keep a reference to this protocol for as long as it lives.
            self._room = memoryview(bytearray(min(self._left, DROPPED_BYTES)))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Say where the next bytes go."""
        return self._room[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        """Note that bytes have come."""
        self._left -= nbytes
        if not self._done.done():
            self._room = self._room[nbytes:]
            self._count(nbytes)
        if self._left == 0:
            self._end()
            if not self._done.done():
                self._done.set_result(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the handler and uvicorn."""
        if not self._done.done():
            self._done.set_result(False)
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        """Tell uvicorn, which may be answering already."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Tell uvicorn."""
        self._http.resume_writing()
