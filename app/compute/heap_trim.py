"""Keeps the heap small: few heaps, whose free pages are returned to the OS after work.

glibc has up to eight heaps per processor, and a thread reuses what was freed in its own only.
Requests of many sizes fragment them: without trimming, the process grows for thousands of requests
and stays as large as its largest scan; with many heaps, it still grows by a sixth.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from typing import Final

DELAY_S: Final = 10.0
"""Time from the first work after a trim to the next trim. Pages must be cleared again when they are
next used, which takes some milliseconds."""


HEAPS: Final = 2
"""Heaps of the process. More make nothing faster here: large blocks are few."""

M_ARENA_MAX: Final = -8
"""Number of heaps, for ``mallopt``; of glibc's malloc.h."""


def limit_heaps() -> None:
    """Let all threads that start from now on share a few heaps, if the C library can."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Of glibc.
        if mallopt is not None:
            mallopt(M_ARENA_MAX, HEAPS)


def trim_heap() -> None:
    """Return the free pages of all heaps to the OS, if the C library can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Of glibc; musl has none.
        if trim is not None:
            trim(0)


class HeapTrimmer:
    """One timer: trims once after work, every ``delay_s`` while it goes on, and never when idle."""

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], None],
        delay_s: float = DELAY_S,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self._submit = submit
        self._delay_s = delay_s
        self._trim = trim
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Schedule a trim after some work, unless one is scheduled already."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._delay_s, self._on_timer)

    def stop(self) -> None:
        """Cancel the scheduled trim."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self._submit(self._trim)
