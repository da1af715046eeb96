"""uvicorn's HTTP/1.1 protocol, with limits on what one connection may send.

- Heads and trailers are limited in bytes and fields as they arrive. What breaks a limit or the
  grammar is answered by the application like any other request, after those before it.
- ``Host`` is required, ``Upgrade`` is ignored, and no transfer coding but ``chunked`` is known.
- Few requests may wait for the answers of those before them, and few chunks of a body may be tiny.
- Few connections are kept after a response.
- A response to HTTP/1.0 is not chunked.
- A body that is still arriving may be refused.

``app.server.connection`` has the limits in time, and the private parts of uvicorn that are used.
"""

from functools import partial
from typing import Final, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application, HTTPScope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.api import LEFT_EXTENSION, REFUSAL_EXTENSION
from app.errors import HeadTooLarge, LandmarkdError, RequestError, UnknownCoding
from app.server.connection import TimedConnection

MAX_HEAD_BYTES: Final = 64 << 10
"""Of a request's URL and headers, of those of all that wait for others' answers together, of its
trailers, or of the framing of a chunk."""

MAX_FIELDS: Final = 100
"""Headers, or trailers, of a request."""

MAX_PIPELINED: Final = 8
"""Requests that wait for the answers of those before them."""

MAX_KEPT: Final = 256
"""Connections that are kept for other requests, as each takes a file descriptor of maybe 1024."""

MIN_CHUNK_BYTES: Final = 64
"""Of a body's chunks, on average: each takes microseconds of the event loop, however small.

Lines of a binary file, which programs may send one by one, have 256."""

SMALL_CHUNKS: Final = 1000
"""Empty chunks that a body may have in a row; larger ones earn no more."""

REFUSED_HEAD: Final = b"GET / HTTP/1.1\r\nHost: \r\nConnection: close\r\n\r\n"
"""Parsed in place of a head that is refused."""


class HttpProtocol(TimedConnection):
    """uvicorn's HTTP/1.1 protocol with limits."""

    _pending = 0  # Bytes since the last head, bytes of a body, or end of a body.
    _fields = _field_bytes = 0
    _chunk_credit = 0  # Bytes that the next chunks of a body may be too small by, together.
    _refusal: RequestError | None = None  # Why the latest head was refused.
    _failure: partial[LandmarkdError] | None = None  # Why the latest body was refused.

    # Requests.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        respond = partial(self._respond, cycle, cast("ASGIApp", app))
        super()._start_asgi_task(cycle, cast("ASGI3Application", respond))

    async def _respond(
        self,
        cycle: RequestResponseCycle,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Run the application for one request."""

        async def receive_body() -> Message:
            self._raise_failure(cycle)
            message = await receive()
            self._raise_failure(cycle)
            return message

        endless = False

        async def send_response(message: Message) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = _has_no_end(scope, message)
            if endless:
                # uvicorn, which keeps no connection of HTTP/1.0, would send chunks.
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))
            if cycle.waiting_for_100_continue:
                # The client may send its body nevertheless, or its next request.
                cycle.keep_alive = False
            await send(message)
            if not (cycle.keep_alive or cycle.response_complete):
                # uvicorn would close the connection at once.
                self._closing = cycle.keep_alive = True

        def has_left() -> bool:
            return cycle.disconnected and not cycle.response_complete

        # Of a copy, since the cycle holds the scope.
        extensions = {**scope.get("extensions", {}), LEFT_EXTENSION: has_left}
        await app({**scope, "extensions": extensions}, receive_body, send_response)

    def _raise_failure(self, cycle: RequestResponseCycle) -> None:
        if self._failure is not None and cycle is self.cycle:
            raise self._failure()

    def refuse_body(self, kind: type[LandmarkdError], detail: str) -> None:
        """If a body is still arriving, raise an error in the application that receives it."""
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

    # Parsing.

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not self._ignoring:
            rest = self._parse(rest)
        self._update_timer()

    def _parse(self, data: memoryview) -> memoryview:
        """Parse bytes, and return those that the parser has left."""
        self._pending += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._refuse(error)
        else:
            if self._pending > MAX_HEAD_BYTES:
                self._refuse(_too_large())
        return data[:0]

    def _ignore_upgrade(self) -> None:
        """Parse the body of a request that the parser took for another protocol's."""
        framing = (b"content-length", b"transfer-encoding")
        fields = (name + b": " + value for name, value in self.headers if name in framing)
        self._new_parser()
        # Within a body, only its framing is taken from a head.
        self._parse(memoryview(b"\r\n".join((b"POST / HTTP/1.1", *fields, b"", b""))))

    def _refuse(self, error: Exception) -> None:
        """Refuse what has arrived, after the requests before it, and ignore what follows."""
        cause = error.__context__  # Of an error in a callback.
        if isinstance(cause, RequestError):
            error = cause
        elif not isinstance(error, RequestError):
            why = str(cause or error)[:64]  # It may quote what was sent.
            error = RequestError(f"expected an HTTP/1.1 request, got a malformed one: {why}")
        self._ignoring = True
        if self._in_body:
            self.refuse_body(type(error), str(error))
        else:
            self._refusal = error
            self._new_parser()
            self.parser.feed_data(REFUSED_HEAD)

    def _new_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn does.

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._in_body:
            return
        if len(self.pipeline) >= MAX_PIPELINED and self._refusal is None:
            raise RequestError(
                f"expected at most {MAX_PIPELINED} requests of a connection to wait for the "
                "answers of others, got more"
            )
        self._fields = self._field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Receive a part of the URL."""
        if not self._in_body:
            self._count_field(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a header, or a trailer, which is ignored."""
        self._fields += 1
        self._count_field(len(name) + len(value))
        if not self._in_body:
            super().on_header(name, value.strip(b" \t"))

    def _count_field(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > MAX_HEAD_BYTES or self._fields > MAX_FIELDS:
            raise _too_large()

    def on_headers_complete(self) -> None:
        """Start the application."""
        if self._in_body:
            return
        if self.pipeline and self._refusal is None:
            self._check_waiting()
        self._pending = self._fields = self._field_bytes = 0
        self._chunk_credit = SMALL_CHUNKS * MIN_CHUNK_BYTES
        super().on_headers_complete()
        # Only who reads notices that a client has left; few requests may wait, with little.
        self.flow.resume_reading()
        self._in_body = True
        refusal = self._refusal or self._check_host() or self._check_coding()
        self.scope["extensions"] = {REFUSAL_EXTENSION: cast("dict[object, object]", refusal)}
        if refusal is not None or len(self.connections) > MAX_KEPT:
            self.cycle.keep_alive = False

    def _check_waiting(self) -> None:
        """Limit the heads that wait, together: each is kept until its request is answered."""
        scopes = [cycle.scope for cycle, _ in self.pipeline]
        if self._field_bytes + sum(map(_head_bytes, scopes)) > MAX_HEAD_BYTES:
            raise HeadTooLarge(
                f"expected heads of at most {MAX_HEAD_BYTES} bytes together of the requests that "
                "wait for the answers of others, got more"
            )

    def _check_host(self) -> RequestError | None:
        """Require one ``Host`` (RFC 9112, 3.2)."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts == 1 or (hosts == 0 and self.parser.get_http_version() == "1.0"):
            return None
        return RequestError(f"expected one Host header, got {hosts}")

    def _check_coding(self) -> UnknownCoding | None:
        """Refuse bodies that are compressed for the transfer (RFC 9112, 6.1)."""
        coded = b",".join(value for name, value in self.headers if name == b"transfer-encoding")
        if coded.lower() in {b"", b"chunked"}:
            return None
        return UnknownCoding(
            f"expected Transfer-Encoding to be chunked, got {coded[:64].decode('latin-1')!r}; "
            "a compressed file is told by Content-Encoding, if at all"
        )

    def on_chunk_header(self) -> None:
        """Begin a chunk of the body."""
        self._chunk_credit -= MIN_CHUNK_BYTES
        if self._chunk_credit < 0:
            raise RequestError(
                f"expected a body in chunks of {MIN_CHUNK_BYTES} bytes or more, got more than "
                f"{SMALL_CHUNKS} smaller ones"
            )

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body."""
        self._pending = 0
        self._chunk_credit = min(self._chunk_credit + len(body), SMALL_CHUNKS * MIN_CHUNK_BYTES)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless the parser takes its body for another protocol's."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._in_body = False
            self._pending = 0
            self._ignoring = self._closing or not self.cycle.keep_alive


def _has_no_end(scope: Scope, start: Message) -> bool:
    """Say whether the end of a response is that of its connection: HTTP/1.0 has no chunks."""
    names = {name.lower() for name, _ in start.get("headers", ())}
    return scope["http_version"] == "1.0" and b"content-length" not in names


def _head_bytes(scope: HTTPScope) -> int:
    fields = sum(len(name) + len(value) for name, value in scope["headers"])
    return len(scope["raw_path"] or b"") + len(scope["query_string"]) + fields


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"expected a head of at most {MAX_HEAD_BYTES} bytes and {MAX_FIELDS} fields, got more"
    )
