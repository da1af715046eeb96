"""Settings -> a process that serves the application until it is told to stop.

uvicorn with four additions: large bodies are received in place (``app.server.http_protocol``); the
head of a request has to arrive within a time limit; before it stops, the service drains (readiness
says no, new work gets 503, accepted work is finished); after a requested stop the exit code is 0.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from types import FrameType
from typing import Final

import uvicorn

from app.api import Shared, create_app
from app.server.http_protocol import DirectBodyProtocol
from app.server.log_format import configure_logging
from app.settings import Settings, is_public_without_keys, unknown_variables

logger = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 5
# Answers that are being written when the engine has drained get this much longer.
LAST_WORDS_S: Final = 5


def serve(settings: Settings | None = None, listener: socket.socket | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain.

    Args:
        settings: All knobs; None reads them from the environment.
        listener: Bound already; None binds to the host and port of the settings.

    Returns:
        The exit code: 0 after a stop that was asked for, else 1.
    """
    chosen = Settings() if settings is None else settings
    configure_logging(chosen.log_level, chosen.log_format)
    for name in unknown_variables(os.environ):
        logger.warning("unknown setting", extra={"variable": name})
    if is_public_without_keys(chosen):
        logger.warning(
            "anyone who reaches this address may use the service: set LANDMARKD_API_KEYS",
            extra={"host": chosen.host},
        )
    server = LandmarkdServer(chosen)
    server.run(None if listener is None else [listener])
    return 1 if server.failed or not server.started else 0


class LandmarkdServer(uvicorn.Server):
    """A uvicorn server that drains the engine before it stops listening."""

    def __init__(self, settings: Settings) -> None:
        """Args: settings of the process."""
        self.app = create_app(settings, on_fatal=self._fail)
        self.failed = False
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

        class Protocol(TimedHeadProtocol):
            head_timeout_s = settings.header_timeout_s

        super().__init__(
            uvicorn.Config(
                self.app,
                host=settings.host,
                port=settings.port,
                http=Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and say where."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.app.state.starting.add_done_callback(_spare_what_stays)
        for server in getattr(self, "servers", []):
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                logger.info("listening", extra={"host": host, "port": port})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; at the second, stop at once."""
        if self._loop is None or self._draining is not None or not self.started:
            self.should_exit = self.force_exit = True
            return
        del frame
        self._loop.call_soon_threadsafe(self._drain, signal.Signals(sig).name)

    def _drain(self, name: str) -> None:
        if self._draining is None:
            shared: Shared = self.app.state.shared
            shared.engine.close()
            # Only now, so that whoever reads it can rely on it.
            logger.info("draining", extra={"signal": name})
            self._draining = asyncio.get_running_loop().create_task(self._drain_engine())

    async def _drain_engine(self) -> None:
        shared: Shared = self.app.state.shared
        try:
            await shared.engine.stop()
        finally:
            self.should_exit = True

    def _fail(self) -> None:
        self.failed = self.should_exit = True


def _spare_what_stays(starting: "asyncio.Task[None]") -> None:
    """Turn the garbage collector on; it passes over what the start has made, for 0.3 s a time."""
    del starting
    gc.freeze()
    gc.enable()


class TimedHeadProtocol(DirectBodyProtocol):
    """uvicorn's HTTP/1.1 protocol, with a limit on the time between two requests.

    The clock runs whenever no request is being answered: while a head arrives, and while a client
    goes on sending the body of a request that was refused.
    """

    head_timeout_s: float
    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._wind()

    def data_received(self, data: bytes) -> None:
        """Stop the clock if this completes a head, start it if there is no request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        else:
            self._wind()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def _wind(self) -> None:
        if self._clock is None and not self.transport.is_closing():
            self._clock = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
