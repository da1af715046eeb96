"""Programs in processes of their own, which need not import the service anew.

A service is up after some 4 s, nearly all of which are imports that all of them share. A fork
server does those once: what it forks is up after a tenth of that, and is otherwise the same.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from typing import TextIO
from unittest.mock import patch

IMPORTED = (
    "app.cli.main",
    "app.server.process",
    "app.api",
    "app.inference",
    "monai.networks.nets",
    "tests.support.numba_tables",
    "tests.support.programs",
)


def start_program(
    code: str, environment: Mapping[str, str], *, fresh: bool
) -> tuple[BaseProcess, TextIO]:
    """Start a program of this checkout in a process that ends with this one.

    Args:
        code: Python.
        environment: All of its environment.
        fresh: Whether its interpreter has imported nothing: where memory or a start is looked at.

    Returns:
        The process, and what it writes to its standard error.
    """
    context = get_context("spawn") if fresh else _fork_server()
    reading, writing = context.Pipe(duplex=False)
    with reading, writing:
        process = context.Process(  # type: ignore[attr-defined] # of each context that there is
            target=_run, args=(code, dict(environment), writing), daemon=True
        )
        process.start()
        return process, os.fdopen(os.dup(reading.fileno()), encoding="utf-8")


@cache
def _fork_server() -> BaseContext:
    """Start it with an empty environment: libraries read variables when they are loaded."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with patch.dict(os.environ, clear=True):
        ensure_running()
    return context


def _run(code: str, environment: Mapping[str, str], errors: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(errors.fileno(), 2)
    exec(code, {"__name__": "__main__"})  # noqa: S102 - it is our own text


@dataclass(frozen=True, slots=True)
class ForkedModule:
    """What ``fork_module`` has started, with what is used of ``subprocess.Popen``."""

    process: BaseProcess

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self.process.pid

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process.name), timeout or 0.0)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()


def fork_module(words: Sequence[str], environment: Mapping[str, str], log: TextIO) -> ForkedModule:
    """Run a module as ``tests.benchmarks.servers.start_module`` does, but by the fork server."""
    code = (
        "import os, runpy, sys\n"
        "os.setsid()\n"
        f"log = os.open({log.name!r}, os.O_WRONLY | os.O_APPEND)\n"
        "os.dup2(log, 1)\n"
        "os.dup2(log, 2)\n"
        f"sys.argv[:] = {list(words)!r}\n"
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    process, errors = start_program(code, environment, fresh=False)
    errors.close()
    return ForkedModule(process)
