"""One connection of uvicorn's, with limits on the time that its client may take for anything.

A head has to arrive in time, a response has to be read, and a body that is not awaited is discarded
for a while, so that its client can read the response. A client may close its half of the connection
and still get its response.

Private parts of uvicorn that are used here and in ``app.server.http_protocol``, for which
``pyproject.toml`` bounds its version: of ``HttpToolsProtocol`` the attributes ``app``, ``cycle``,
``flow``, ``headers``, ``loop``, ``parser``, ``scope``, ``server_state`` and ``transport``, the
parser's callbacks, ``on_response_complete``, ``shutdown`` and ``_unset_keepalive_if_required``; all
attributes of ``RequestResponseCycle``; and that the ``receive`` of an application is its method.
"""

import asyncio
import logging
import socket
import struct
from typing import Any, Final, Literal, cast

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

DISCARD_S: Final = 30.0
"""For the rest of a body that is not awaited, all in all (as in nginx)."""

DISCARD_IDLE_S: Final = 5.0
"""For the next bytes of a body that is not awaited (as in nginx)."""

SHUTDOWN_DISCARD_S: Final = 1.0
"""For the rest of a body that is not awaited, once the service stops."""

STALL_CHECKS: Final = 6
"""Checks within the time limit for a response that is not being read."""

PROBE_S: Final = 1.0
"""For a response to a client that has closed its half, before it is checked whether it has left."""

PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_REPLY_S: Final = 0.1

RESET: Final = struct.pack("ii", 1, 0)
"""Value of ``SO_LINGER``."""

State = Literal["head", "response", "discard"]
"""What a connection is waiting for: a request, the application, or the end of a useless body."""

logger = logging.getLogger(__name__)


class TimedConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with time limits.

    Attributes:
        head_timeout_s: Time within which a head must arrive.
        stall_timeout_s: Time after which a response is given up if its client reads nothing of it.
    """

    head_timeout_s = 10.0
    stall_timeout_s = 30.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_body = False  # The body of the latest request has not ended.
        self._ignoring = False  # What arrives is discarded.
        self._current: RequestResponseCycle | None = None  # The request that is being answered.
        self._last: RequestResponseCycle | None = None  # The connection closes after its response.
        self._half_closed = False
        self._lingering = False  # Nothing more is sent.
        self._state: State = "response"
        self._state_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: object) -> None:
        """Wait for a head."""
        # uvloop's transports are none of asyncio's.
        super().connection_made(cast("asyncio.Transport", transport))
        # Pause the application as long as anything of its response is left to send.
        self.transport.set_write_buffer_limits(high=0)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        for timer in (self._timer, self._stall_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._current = self._last = None

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
            self._timer = None
        if state != "response":
            end = now + self.head_timeout_s
            if state == "discard":
                end = min(end, now + DISCARD_IDLE_S, self._state_since + DISCARD_S)
            self._timer = self.loop.call_at(end, self.transport.close)

    # Closing.

    def on_response_complete(self) -> None:
        """Start the next request, or close."""
        if self._last and self._last.response_complete and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self._linger()
            return
        super().on_response_complete()
        if self._in_body and not self._is_answering():
            self.on_discard()

    def on_discard(self) -> None:
        """Restart the time limit for the next bytes of a body that is not awaited."""
        if not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._update_timer()

    def _linger(self) -> None:
        """Close when the client has closed its half.

        Closed before, the connection would be reset by whatever the client still sends, and the
        client could lose the response (RFC 9112, 9.6).
        """
        self._ignoring = self._lingering = True
        if self._half_closed:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.on_discard()

    def shutdown(self) -> None:
        """Close after the current response, because the service stops."""
        if self._lingering:
            self._state_since = self.loop.time() + SHUTDOWN_DISCARD_S - DISCARD_S
            self._update_timer()
        else:
            super().shutdown()

    # Clients that close their half.

    def _keep_half(self) -> bool:
        """Keep the connection for the responses to requests that have arrived whole."""
        if self._lingering or self._in_body or not self._is_answering():
            return False
        started = self._current is not None and self._current.response_started
        if started and not self.flow.write_paused:
            return False  # In a stream of events: the client has left.
        self._ignoring = self._half_closed = True
        self.cycle.keep_alive = False
        if self._probe_timer is None:
            self._probe_timer = self.loop.call_later(PROBE_S, self._probe)
        return True

    eof_received: Any = _keep_half  # uvicorn's returns nothing, and the connection closes.

    def _probe(self, sent: bool = False) -> None:
        """Check whether a client that has closed its half has left, which only sending can tell.

        The system of a client that has left replies with a reset. Any other client passes over an
        interim response (RFC 9110, 15.2).
        """
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        delay_s, current = PROBE_S, self._current
        if not sent and current is not None and not current.response_started:
            sent = True
            if current.scope["http_version"] == "1.1":
                self.transport.write(PROBE)
                delay_s = PROBE_REPLY_S
        self._probe_timer = self.loop.call_later(delay_s, self._probe, sent)

    # Clients that do not read.

    def pause_writing(self) -> None:
        """Pause the application until the client has read, and watch whether it does."""
        super().pause_writing()
        if self._stall_timer is None:
            self._check_stall(-1, 0)

    def resume_writing(self) -> None:
        """Continue: all has been sent."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_stall(self, size: int, checks: int) -> None:
        """Give a response up if nothing of it could be sent since so many checks."""
        left = self.transport.get_write_buffer_size()
        checks = checks + 1 if left == size else 0
        if checks == STALL_CHECKS:
            logger.info("response not read", extra={"unsent_bytes": left})
            # By a reset, so that the system gives up what it holds, too.
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.transport.abort()
            return
        wait_s = self.stall_timeout_s / STALL_CHECKS
        self._stall_timer = self.loop.call_later(wait_s, self._check_stall, left, checks)
