"""One connection of uvicorn's, with limits on the time that its client may take for anything.

A head has to arrive in time, a response has to be read, and a body that is not awaited is discarded
for a while, so that its client can read the response. A client may close its half of the connection
and still get its response. Where connections run short, those go whose clients
have neither sent nor read for longest.

Private parts of uvicorn that are used here and in ``app.server.http_protocol``, for which
``pyproject.toml`` bounds its version: of ``HttpToolsProtocol`` the attributes ``connections``,
``cycle``, ``flow``, ``headers``, ``loop``, ``parser``, ``pipeline``, ``scope`` and ``transport``,
the callbacks of the parser, ``on_response_complete``, ``shutdown``, ``_start_asgi_task`` and
``_unset_keepalive_if_required``; and all attributes of ``RequestResponseCycle``.
"""

import asyncio
import logging
import socket
import struct
from math import inf
from typing import Final, Literal, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

DISCARD_S: Final = 30.0
"""For the rest of a body that is not awaited, all in all (as in nginx)."""

DISCARD_IDLE_S: Final = 5.0
"""For the next bytes of a body that is not awaited (as in nginx)."""

SHUTDOWN_DISCARD_S: Final = 1.0
"""For the rest of a body that is not awaited, once the service stops."""

PROBE_S: Final = 1.0
"""From the end of what a client sends to the first probe; then each pause is twice the one before.
"""

PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

UNSENT_BYTES: Final = 64 << 10
"""That the system takes of a response beyond what is on its way. It would take megabytes, of which
no limit knows, and keep them for a client that does not read for as long as the connection is kept.
"""

RESET: Final = struct.pack("ii", 1, 0)
"""Value of ``SO_LINGER``."""

IDLE_PART: Final = 8
"""Of the connections, one in so many is closed when there are too many."""

State = Literal["head", "response", "discard"]
"""What a connection is waiting for: a request, the application, or the end of a useless body."""

logger = logging.getLogger(__name__)


class TimedConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with time limits.

    Attributes:
        head_timeout_s: Time within which a head must arrive.
        read_timeout_s: Time within which the client must read the next part of a response.
        max_open: Connections that may be open at once, so that there is one for who comes next.
    """

    head_timeout_s = 10.0
    read_timeout_s = 30.0
    max_open = 768

    _in_body = False  # The body of the latest request has not ended.
    _ignoring = False  # What arrives is discarded.
    _closing = False  # The response that is being sent is the last one.
    _lingering = False  # The last response has been sent.
    _half_closed = False  # Nothing more arrives.
    _running: RequestResponseCycle | None = None  # Of the request that the application has begun.
    _state: State = "response"
    _state_since = 0.0
    _idle_since = 0.0  # When it was made, the latest response ended, or the client read no more.
    _timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: object) -> None:
        """Wait for a head, and make room for the next connection."""
        # uvloop's transports are none of asyncio's.
        super().connection_made(cast("asyncio.Transport", transport))
        self._idle_since = self.loop.time()
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        # Pause the application as long as anything of its response is left to send.
        self.transport.set_write_buffer_limits(high=0)
        self._update_timer()
        if len(self.connections) > self.max_open:
            self._close_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and tell the application that the client has left."""
        for timer in (self._timer, self._read_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        # uvicorn tells the latest request, which may be another one that waits behind it.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def idle_since(self) -> float:
        """Return since when the client sends no request, or reads no response; infinity: it does.

        On the loop's clock.
        """
        is_active = self._is_answering() and not self.flow.write_paused
        return inf if is_active else self._idle_since

    def _update_timer(self) -> None:
        """Limit the time for a head, or for the rest of a body that is not awaited."""
        state: State = "head"
        if self._lingering or (self._in_body and not self._is_answering()):
            state = "discard"
        elif self._is_answering():
            state = "response"
        if state == self._state == "head":
            return
        now = self.loop.time()
        if state != self._state:
            self._state, self._state_since = state, now
        if self._timer is not None:
            self._timer.cancel()
        if state != "response":
            end = now + self.head_timeout_s
            if state == "discard":
                end = min(end, now + DISCARD_IDLE_S, self._state_since + DISCARD_S)
            self._timer = self.loop.call_at(end, self.transport.close)

    # Closing.

    def _close_idle(self) -> None:
        """Close connections whose clients neither send nor read, those that have been so longest.

        An address that opens connections again and again would have all of them. It cannot be told
        from a proxy, but a client that sends a request and reads is idle for moments only.
        """
        connections = cast("set[TimedConnection]", self.connections)
        # Many at once: to find them takes milliseconds, and who opens one opens the next.
        count = 1 + len(connections) // IDLE_PART
        for one in sorted(connections, key=TimedConnection.idle_since)[:count]:
            if one.idle_since() < inf:
                connections.discard(one)
                one.drop()

    def drop(self) -> None:
        """Close at once; the system gives up what it holds for a client that does not read, too."""
        if self.transport.get_write_buffer_size():
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.transport.abort()

    def on_response_complete(self) -> None:
        """Start the next request, discard the rest of this one's body, or close."""
        self._idle_since = self.loop.time()
        if self._closing:
            self._linger()
            return
        super().on_response_complete()
        if self._in_body and not self._is_answering():
            self._unset_keepalive_if_required()
            self._update_timer()

    def _linger(self) -> None:
        """Close when the client has closed its half.

        Closed before, the connection would be reset by whatever the client still sends, and the
        client could lose the response (RFC 9112, 9.6).
        """
        if self._half_closed or self.transport.is_closing():
            self.transport.close()
            return
        self._ignoring = self._lingering = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._update_timer()

    def shutdown(self) -> None:
        """Close after the current response, because the service stops."""
        if self._lingering:
            self.loop.call_later(SHUTDOWN_DISCARD_S, self.transport.close)
        else:
            super().shutdown()

    # Clients that close their half.

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's returns nothing
        """Keep the connection for the responses to requests that have arrived whole."""
        if self._lingering or self._in_body or not self._is_answering():
            return False
        if self.cycle.response_started and not self.flow.write_paused:
            return False  # In a stream of events: the client has left.
        self._ignoring = self._half_closed = True
        self.cycle.keep_alive = False
        self._probe_timer = self.loop.call_later(PROBE_S, self._probe, PROBE_S)
        return True

    def _probe(self, pause_s: float) -> None:
        """Write to a client that has closed its half, since only that tells whether it has left.

        The system of a client that has left replies with a reset, and the next write fails. Any
        other client passes over interim responses (RFC 9110, 15.2).
        """
        running = self._running
        if running and not running.response_started and running.scope["http_version"] == "1.1":
            self.transport.write(PROBE)
        self._probe_timer = self.loop.call_later(pause_s, self._probe, 2 * pause_s)

    # Clients that do not read.

    def pause_writing(self) -> None:
        """Pause the application until the client has read, for a limited time."""
        super().pause_writing()
        self._idle_since = self.loop.time()
        self._read_timer = self.loop.call_later(self.read_timeout_s, self._give_up)

    def resume_writing(self) -> None:
        """Continue: all has been sent."""
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def _give_up(self) -> None:
        left = self.transport.get_write_buffer_size()
        logger.info("response not read", extra={"unsent_bytes": left})
        self.drop()
