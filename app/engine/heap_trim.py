"""work that was done -> memory given back to the system: soon after, and never while idle.

The allocator keeps what was freed, in a heap for every thread. Requests of many sizes leave these
heaps full of holes: no byte is lost, and yet the process grows for thousands of requests, and stays
as large as its largest scan. So the holes are given back from time to time.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from typing import Final

REST_S: Final = 5.0
"""Without work, after which memory is given back. It must be cleared again when it is next used,
which takes some milliseconds."""

WORK_S: Final = 10.0
"""Of work without such a rest, after which it is given back nevertheless."""


def give_back_memory() -> None:
    """Give what the allocator keeps unused back to the system, where it knows how to."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Of glibc; musl has none.
        if trim is not None:
            trim(0)


class Tidying:
    """Gives memory back once after work, or now and then while it goes on."""

    def __init__(
        self,
        rest_s: float = REST_S,
        work_s: float = WORK_S,
        tidy: Callable[[], None] = give_back_memory,
    ) -> None:
        """Args: seconds of rest and of work after which to tidy up; how, on a thread of its own."""
        self._rest_s = rest_s
        self._work_s = work_s
        self._tidy = tidy
        self._begun_s = self._last_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def after_work(self) -> None:
        """Note that something was done; called on the event loop."""
        self._last_s = asyncio.get_running_loop().time()
        if self._timer is None:
            self._begun_s = self._last_s
            self._wait()

    def stop(self) -> None:
        """Tidy up no more."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _due_s(self) -> float:
        return min(self._last_s + self._rest_s, self._begun_s + self._work_s)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_at(self._due_s, self._look, self._due_s)

    def _look(self, due_s: float) -> None:
        """Tidy up, unless more was done since."""
        if due_s < self._due_s:
            self._wait()
            return
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, self._tidy)
