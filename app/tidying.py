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

EVERY_S: Final = 5.0
"""As long as there is work. What is given back too soon must be cleared again, which takes some
milliseconds."""


def give_back_memory() -> None:
    """Give what the allocator keeps unused back to the system, where it knows how to."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Of glibc; musl has none.
        if trim is not None:
            trim(0)


class Tidying:
    """Gives memory back a while after work was done, at most once in that while."""

    def __init__(
        self, every_s: float = EVERY_S, tidy: Callable[[], None] = give_back_memory
    ) -> None:
        """Args: seconds from work to tidying up; what is called then, in a thread of its own."""
        self._every_s = every_s
        self._tidy = tidy
        self._timer: asyncio.TimerHandle | None = None

    def after_work(self) -> None:
        """Note that something was done; called on the event loop."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._begin)

    def stop(self) -> None:
        """Tidy up no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, self._tidy)
