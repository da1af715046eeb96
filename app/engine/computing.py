"""work that needs no model and no device -> its result, on threads of its own."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from app.errors import DeadlineExceeded

THREADS: Final = 2
"""Each piece of work may hold gigabytes, so the rest waits its turn."""

Result = TypeVar("Result")


class Computing:
    """Threads for what a request asks for beside landmarks."""

    def __init__(self) -> None:
        """Begin with no thread."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="compute")

    async def do(self, work: Callable[[Callable[[], None]], Result], limit_s: float) -> Result:
        """Do some work.

        Args:
            work: Is given a function to call now and then, which raises as soon as nobody waits
                for the result any more.
            limit_s: Seconds after which nobody does.

        Returns:
            What the work returns.

        Raises:
            DeadlineExceeded: It took longer.
            LandmarkdError: What the work raises.
        """
        abandoned = threading.Event()

        def go_on() -> None:
            if abandoned.is_set():
                raise DeadlineExceeded("expected somebody to wait for the answer, got nobody")

        try:
            async with asyncio.timeout(limit_s):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, work, go_on)
        except TimeoutError:
            raise DeadlineExceeded(f"expected an answer within {limit_s:g} s, got none") from None
        finally:
            abandoned.set()

    def close(self) -> None:
        """Let the threads end; what is not begun is not done any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
