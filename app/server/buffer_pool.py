"""length -> memory to receive a body into, warm where such memory was in use a moment ago.

The kernel clears fresh memory when it is first touched, which takes about as long as to receive
into it. So what large bodies were received into is kept for the next ones: a bounded amount, until
nothing has come for a while. Nobody gives a buffer back: it is free once the last view of it is
gone, wherever that was, and not before.
"""

import asyncio
import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from app.api import fresh_buffer

MIB: Final = 1 << 20

KEPT_BYTES: Final = 256 * MIB
"""No more is in use and kept for reuse, together; what does not fit is fresh memory."""

IDLE_S: Final = 10.0
"""What was not used for so long is given back to the system."""

LEAST_BYTES: Final = 1 * MIB
"""Smaller bodies are received into memory that the allocator keeps warm by itself."""

GRAIN_BYTES: Final = 4 * MIB
"""Sizes are multiples, so that bodies of about one size share them; numpy asks for huge pages from
here on, whose first touch costs a fraction of that of small ones."""

MOST_SLACK: Final = 2
"""A buffer is not spent on a body that fills less than one part in so many of it."""

_Buffer = npt.NDArray[np.uint8]


class Buffers:
    """Memory that bodies are received into, again and again; for one event loop.

    Attributes:
        lent_bytes: In use, as far as it was noticed that it is not.
        kept_bytes: Free for reuse.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES, idle_s: float = IDLE_S) -> None:
        """Args: bytes in use and kept, together; seconds for which they are kept without use."""
        self.lent_bytes = 0
        self.kept_bytes = 0
        self._most_bytes = most_bytes
        self._idle_s = idle_s
        self._free: list[tuple[float, _Buffer]] = []  # The one that came back last is the last.
        # Buffers come back on any thread, and in the middle of anything: only append() is safe.
        self._returned: deque[_Buffer] = deque()
        self._clock: asyncio.TimerHandle | None = None

    def reserve(self, length: int) -> memoryview:
        """Find memory for a body.

        Args:
            length: Bytes that the body has.

        Returns:
            As many bytes; what they hold is arbitrary, and may be of another body, until they
            are overwritten.
        """
        if length < LEAST_BYTES:
            return fresh_buffer(length)
        self._take_back()
        buffer = self._find(length)
        if buffer is None:
            return fresh_buffer(length)
        self.lent_bytes += len(buffer)
        if self._clock is None:
            self._wind()
        # Every view of what is handed out, of Python or of numpy, holds this object, and nothing
        # else does. Garbage collection passes over it: it goes when the last view has gone.
        lease = np.frombuffer(buffer.data, dtype=np.uint8, count=length)
        weakref.finalize(lease, self._returned.append, buffer).atexit = False
        return lease.data

    def _find(self, length: int) -> _Buffer | None:
        """Choose the smallest free buffer that will do, or make one; None if there is no room."""
        fitting = [
            place
            for place, (_, buffer) in enumerate(self._free)
            if length <= len(buffer) <= MOST_SLACK * max(length, GRAIN_BYTES)
        ]
        if fitting:
            return self._drop(min(fitting, key=lambda place: len(self._free[place][1])))
        size = -(-length // GRAIN_BYTES) * GRAIN_BYTES
        if self.lent_bytes + size > self._most_bytes:
            return None
        while self.lent_bytes + self.kept_bytes + size > self._most_bytes:
            self._drop(0)
        return np.empty(size, dtype=np.uint8)

    def _take_back(self) -> None:
        """Note what has come back."""
        now = asyncio.get_running_loop().time()
        while self._returned:
            buffer = self._returned.popleft()
            self.lent_bytes -= len(buffer)
            self.kept_bytes += len(buffer)
            self._free.append((now, buffer))

    def _drop(self, place: int) -> _Buffer:
        _, buffer = self._free.pop(place)
        self.kept_bytes -= len(buffer)
        return buffer

    def _wind(self) -> None:
        self._clock = asyncio.get_running_loop().call_later(self._idle_s, self._tidy)

    def _tidy(self) -> None:
        """Let go of what was not used lately; look again unless nothing is left."""
        self._clock = None
        while self._free and self._free[0][0] <= asyncio.get_running_loop().time() - self._idle_s:
            self._drop(0)
        self._take_back()
        if self.lent_bytes or self.kept_bytes:
            self._wind()
