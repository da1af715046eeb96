"""The process of the service: runs the application on uvicorn until it is told to stop.

uvicorn with three additions: connections have limits (``app.server.http_protocol``); before it
stops, the service drains (readiness says no, new work and bodies that are still arriving get 503,
accepted work is finished); after a requested stop the exit code is 0.
"""

import asyncio
import atexit
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine
from types import FrameType
from typing import Final

import uvicorn

from app.api import Shared, create_app
from app.compute import limit_heaps
from app.errors import Draining
from app.server.http_protocol import HttpProtocol
from app.server.log_format import configure_logging
from app.server.log_writer import STDERR, LogWriter
from app.settings import Settings, is_public_without_keys, unknown_variables, url_host

logger = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 75
"""Longer than proxies keep idle connections, mostly 60 s: a request that one sends just as the
service closes gets 502."""

SHUTDOWN_S: Final = 5
"""For responses that are still being sent when the engine has drained."""

OPEN_FILES: Final = 4096
"""That the process lets itself have, as each connection takes one: the usual 1,024 are for programs
that call ``select``. With many more, connections could take memory that nobody counts."""

CONNECTION_SHARE: Final = 0.75
"""Of the files that may be open; the others are those of scans, jobs and models."""

SWITCH_S: Final = 1e-3
"""After so long a thread that waits for the interpreter gets it. Python's own 5 ms add up over the
many waits of a scan beside uploads that take long to parse: 2 s instead of 0.2 s at worst. Half as
long costs all others 4 % of their time, this costs none."""


def serve(settings: Settings, listener: socket.socket) -> int:
    """Serve on a socket that is bound, until SIGTERM, SIGINT or SIGHUP, then drain.

    Returns:
        The exit code: 0 after a requested stop, else 1.
    """
    atexit.unregister(logging.shutdown)
    atexit.register(_end_log)
    limit_heaps()
    sys.setswitchinterval(SWITCH_S)
    log = configure_logging(settings.log_level, settings.log_format)
    for name in unknown_variables(os.environ):
        logger.warning("unknown setting", extra={"variable": name})
    if is_public_without_keys(settings):
        logger.warning(
            "the address is public and needs no key: set LANDMARKD_API_KEYS",
            extra={"host": settings.host},
        )
    server = LandmarkdServer(settings, log)
    # uvicorn handles the others. A terminal that closes sends it; whom nohup starts ignores it.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run([listener])
    return 1 if server.failed or not server.started else 0


def _end_log() -> None:
    """Write the log's last lines; let nothing else reach standard error, or wait for who reads it.

    Triton, from 3.9 on, writes a line there for each object that ``gc.freeze`` keeps from being
    collected, which it takes for a leak.
    """
    logging.shutdown()
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)


def allow_connections() -> int:
    """Let the process have more files open than is usual.

    Returns:
        How many of them may be connections.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if one == resource.RLIM_INFINITY else one for one in limits)
    if (files := min(hard, OPEN_FILES)) > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))
    return int(CONNECTION_SHARE * files)


class LandmarkdServer(uvicorn.Server):
    """A uvicorn server that drains the engine before it stops listening.

    Attributes:
        app: The application.
        failed: Whether the engine could not start or continue.
    """

    def __init__(self, settings: Settings, log: LogWriter) -> None:
        self.app = create_app(settings, on_fatal=self._fail)
        self.app.openapi()  # Made once, in 0.1 s, which nobody is to wait for.
        self._log = log
        self.failed = False
        self._signals = 0
        self._stopping: list[asyncio.Task[None]] = []

        class Protocol(HttpProtocol):
            head_timeout_s = settings.header_timeout_s
            max_open = allow_connections()

        super().__init__(
            uvicorn.Config(
                self.app,
                http=Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                # Whoever is on this machine could forge an address, and so be another client.
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and log the address."""
        await super().startup(sockets)
        if self.started:
            self.app.state.shared.metrics.registry.register(self._log)
            self.app.state.starting.add_done_callback(_freeze_gc)
        for server in getattr(self, "servers", []):
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                where = {"host": host, "port": port, "url": f"http://{url_host(host)}:{port}/"}
                logger.info("listening", extra=where)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end that at the second, stop at once at the third."""
        del frame
        self._signals += 1
        if self._signals > 2 or not self.started:
            self.should_exit = self.force_exit = True
            return
        # From within a signal handler, it may not be used otherwise.
        asyncio.get_running_loop().call_soon_threadsafe(self._drain, signal.Signals(sig).name)

    def _drain(self, name: str) -> None:
        shared: Shared = self.app.state.shared
        shared.engine.close()
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, HttpProtocol):
                connection.refuse_body(Draining, "expected the body before the service stops")
        # After closing the engine, so that the line means that new requests are refused.
        logger.info("draining", extra={"signal": name})
        # Whoever stops a service twice wants no more waiting; the clients that wait are told.
        stop = shared.engine.stop(at_once=bool(self._stopping))
        self._stopping.append(asyncio.get_running_loop().create_task(self._exit_after(stop)))

    async def _exit_after(self, stop: Coroutine[None, None, None]) -> None:
        try:
            await stop
        finally:
            self.should_exit = True

    def _fail(self) -> None:
        self.failed = self.should_exit = True


def _freeze_gc(starting: "asyncio.Task[None]") -> None:
    """Enable garbage collection, except of the objects made so far: traversing them takes 0.3 s."""
    del starting
    gc.freeze()
    gc.enable()
