"""uvicorn's HTTP/1.1 protocol, with limits on what one connection may send.

- Heads and trailers are limited in bytes and fields as they arrive. What breaks a limit or the
  grammar is answered by the application like any other request, after those before it.
- ``Host`` is required, and ``Upgrade`` is ignored.
- A body that is still arriving may be refused.
- A large body may be received into the application's buffer (``app.server.direct_body``).

``app.server.connection`` has the limits in time, and the private parts of uvicorn that are used.
"""

import asyncio
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any, Final, cast

import httptools
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from app.api import BODY_EXTENSION, REFUSAL_EXTENSION
from app.errors import HeadTooLarge, LandmarkdError, RequestError
from app.server.connection import TimedConnection
from app.server.direct_body import BodyReceiver, DirectBody

MAX_HEAD_BYTES: Final = 64 << 10
"""Of a request's URL and headers, of its trailers, or of the framing of a chunk."""

MAX_FIELDS: Final = 100
"""Headers, or trailers, of a request."""

REFUSED_HEAD: Final = b"GET / HTTP/1.1\r\nHost: \r\nConnection: close\r\n\r\n"
"""Parsed in place of a head that is refused."""


class HttpProtocol(TimedConnection):
    """uvicorn's HTTP/1.1 protocol with limits.

    Attributes:
        remaining: Bytes of the current body that have not arrived, if its length is known.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.remaining = 0
        self._pending = 0  # Bytes since the last head, bytes of a body, or end of a body.
        self._fields = self._field_bytes = 0
        self._restarted = False  # The parser is shown only the framing of a request.
        self._refusal: RequestError | None = None  # Why the latest head was refused.
        self._failure: partial[LandmarkdError] | None = None  # Why the latest body was refused.

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the application."""
        super().connection_lost(exc)
        self._failure = None

    # Requests.

    @property
    def app(self) -> ASGIApp:
        """What uvicorn runs for each request; not stored: a bound method would be a cycle."""
        return self._respond

    @app.setter
    def app(self, app: ASGIApp) -> None:
        self._app = app

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request."""
        cycle = cast("RequestResponseCycle", cast("MethodType", receive).__self__)
        self._current = cycle

        async def receive_body() -> Message:
            self._raise_failure(cycle)
            message = await receive()
            self._raise_failure(cycle)
            return message

        async def send_response(message: Message) -> None:
            if cycle.waiting_for_100_continue:
                # The client may send its body nevertheless, or its next request.
                cycle.keep_alive = False
            if message["type"] == "http.response.start" and not cycle.keep_alive:
                MutableHeaders(scope=message)["Connection"] = "close"  # uvicorn 0.30 forgets it.
            await send(message)
            if not (cycle.keep_alive or cycle.response_complete):
                # uvicorn would close the connection at once.
                self._last, cycle.keep_alive = cycle, True

        try:
            await self._app(scope, receive_body, send_response)
        finally:
            if self._current is cycle:
                self._current = None

    def check_body(self, cycle: RequestResponseCycle) -> None:
        """Raise an error if the body of a request will not be completed.

        Raises:
            LandmarkdError: It was refused.
            ClientDisconnect: The client has left.
        """
        self._raise_failure(cycle)
        if cycle.disconnected:
            raise ClientDisconnect

    def _raise_failure(self, cycle: RequestResponseCycle) -> None:
        if self._failure is not None and cycle is self.cycle:
            raise self._failure()

    def refuse_body(self, kind: type[LandmarkdError], detail: str) -> None:
        """If a body is still arriving, raise an error in the application that receives it.

        Args:
            kind: Class of the error.
            detail: Its text.
        """
        if not self._in_body:
            return
        self._ignoring = True
        if self.cycle.response_complete:
            self._linger()
            return
        # Not the error itself, which would hold the frames that it passes, and their memory.
        self._failure = partial(kind, detail)
        self.cycle.keep_alive = False
        self.cycle.message_event.set()
        protocol = self.transport.get_protocol()
        if isinstance(protocol, BodyReceiver):
            protocol.stop()

    # Parsing.

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not self._ignoring:
            rest = self._parse(rest)
        self._update_timer()

    def _parse(self, data: memoryview) -> memoryview:
        """Parse a part, and return the rest."""
        part = data[:MAX_HEAD_BYTES]
        self._pending += len(part)
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._refuse(error)
        else:
            if self._pending > MAX_HEAD_BYTES:
                self._refuse(_too_large())
        return data[len(part) :]

    def _ignore_upgrade(self) -> None:
        """Parse the body of a request that the parser took for another protocol's."""
        framing = (b"content-length", b"transfer-encoding")
        fields = (name + b": " + value for name, value in self.headers if name in framing)
        self._new_parser()
        self._restarted = True
        try:
            self.parser.feed_data(b"\r\n".join((b"POST / HTTP/1.1", *fields, b"", b"")))
        except httptools.HttpParserError as error:
            self._refuse(error)
        finally:
            self._restarted = False

    def _refuse(self, error: Exception) -> None:
        """Refuse what has arrived, after the requests before it, and ignore what follows."""
        cause = error.__context__  # Of an error in a callback.
        if isinstance(cause, RequestError):
            error = cause
        elif not isinstance(error, RequestError):
            error = RequestError("expected an HTTP/1.1 request, got a malformed one")
        self._ignoring = True
        if self._in_body:
            self.refuse_body(type(error), str(error))
        else:
            self._refusal = error
            self._new_parser()
            self.parser.feed_data(REFUSED_HEAD)

    def _new_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # As uvicorn does; httptools has it since 0.6.3.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Begin a request."""
        if not self._restarted:
            self._fields = self._field_bytes = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Receive a part of the URL."""
        if not self._restarted:
            self._count_field(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a header, or a trailer, which is ignored."""
        if not self._restarted:
            self._fields += 1
            self._count_field(len(name) + len(value))
            if not self._in_body:
                super().on_header(name, value.strip(b" \t"))

    def _count_field(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > MAX_HEAD_BYTES or self._fields > MAX_FIELDS:
            raise _too_large()

    def on_headers_complete(self) -> None:
        """Start the application, with ``FillBody`` if the length of the body is known."""
        if self._restarted:
            return
        self._pending = self._fields = self._field_bytes = 0
        super().on_headers_complete()
        self._in_body = True
        extensions: dict[str, object] = {}
        headers = dict(self.headers)
        # The parser has refused several lengths, invalid ones, and both kinds of framing at once.
        if b"content-length" in headers and b"transfer-encoding" not in headers:
            self.remaining = int(headers[b"content-length"])
            extensions[BODY_EXTENSION] = DirectBody(self, self.cycle)
        refusal = self._refusal or self._check_host()
        if refusal is not None:
            extensions[REFUSAL_EXTENSION] = refusal
            self.cycle.keep_alive = False
        self.scope["extensions"] = cast("dict[str, dict[object, object]]", extensions)

    def _check_host(self) -> RequestError | None:
        """Require one ``Host`` (RFC 9112, 3.2)."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts == 1 or (hosts == 0 and self.parser.get_http_version() == "1.0"):
            return None
        return RequestError(f"expected one Host header, got {hosts}")

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body."""
        self._pending = 0
        self.remaining -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless the parser takes its body for another protocol's."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._end_body()

    def end_direct_body(self, cycle: RequestResponseCycle) -> None:
        """Continue after the last byte of a body that was received directly."""
        self._new_parser()  # The other one has not seen it.
        cycle.more_body = False
        self.set_protocol(self)
        self._end_body()
        self._update_timer()

    def _end_body(self) -> None:
        self._in_body = False
        self.remaining = self._pending = 0
        if not self.cycle.keep_alive or self._last is self.cycle:
            self._ignoring = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Give the connection to a protocol."""
        # Not every version of every loop accepts another kind of protocol while it reads.
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"expected a head of at most {MAX_HEAD_BYTES} bytes and {MAX_FIELDS} fields, got more"
    )
