"""Threads for work on the host, which must block neither the event loop nor a device's thread."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from app.compute import adopt_thread_limit, start_executor, start_thread
from app.errors import DeadlineExceeded, Draining, NotReady

Result = TypeVar("Result")


class HostPool:
    """A few threads of one purpose; more work than threads waits its turn.

    Raises:
        StartupError: As ``start_executor``.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._executor = start_executor(name, threads)
        self._closed = False

    def submit(self, function: Callable[[], object]) -> None:
        """Call a function, which must not raise, on a thread; do nothing if the pool is closed."""
        with suppress(RuntimeError):
            self._executor.submit(function)

    async def run(
        self, function: Callable[[Callable[[], None]], Result], deadline: float
    ) -> Result:
        """Call a function on a thread of the pool, and wait for its result.

        Args:
            function: The work. Its argument, ``check_cancelled``, is to be called now and then; it
                raises once nobody waits for the result any more.
            deadline: On the event loop's clock.

        Raises:
            DeadlineExceeded: There was no result until the deadline.
            Draining: The pool was closed before the function was called.
            LandmarkdError: Raised by the function.
        """
        cancelled = threading.Event()

        def check_cancelled() -> None:
            if cancelled.is_set():
                raise DeadlineExceeded("expected somebody to wait for the answer, got nobody")

        if self._closed:
            raise _stopped()
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, function, check_cancelled)
        try:
            await asyncio.wait([future], timeout=deadline - loop.time())
            if future.cancelled():  # The pool was closed, and the work dropped.
                raise _stopped()
            if future.done():
                return future.result()
            raise DeadlineExceeded("expected an answer in time (timeout_s), got none")
        finally:
            cancelled.set()
            future.cancel()
            del future  # It holds what is raised, whose traceback holds this frame.

    def close(self) -> None:
        """Let the threads end; work that has not begun is dropped."""
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)


class DaemonThread(threading.Thread):
    """Calls one function after the other; does not keep the process alive if one hangs.

    Raises:
        StartupError: As ``start_thread``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._functions = SimpleQueue[Callable[[], None] | None]()
        start_thread(self)

    def submit(self, function: Callable[[], None]) -> None:
        """Have a function called, which must not raise."""
        self._functions.put(function)

    def close(self) -> None:
        """Let the thread end."""
        self._functions.put(None)

    def run(self) -> None:
        """Call what is submitted, until the thread is closed."""
        adopt_thread_limit()
        while (function := self._functions.get()) is not None:
            function()
            del function


def start_daemon_thread(function: Callable[[], Result]) -> Future[Result]:
    """Call a function that may block for long, such as one that loads models.

    A daemon thread does not keep the process alive, as a thread of an executor would.

    Returns:
        Receives what the function returns or raises.

    Raises:
        NotReady: The system lets no thread start.
    """
    future: Future[Result] = Future()

    def call() -> None:
        adopt_thread_limit()
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to who waits for the future
            future.set_exception(error)

    try:
        threading.Thread(target=call, name="load", daemon=True).start()
    except RuntimeError as error:
        raise NotReady(
            f"expected a system that lets a thread start to load a model, got: {error}; "
            "allow more processes and threads, or restart the service"
        ) from error
    return future


async def run_in_daemon_thread(function: Callable[[], Result]) -> Result:
    """Wait for what a function returns on a thread that ``start_daemon_thread`` starts."""
    return await asyncio.shield(asyncio.wrap_future(start_daemon_thread(function)))


def _stopped() -> Draining:
    return Draining("expected an answer before the service stopped, got none; try another")
