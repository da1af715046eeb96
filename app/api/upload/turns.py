"""Turns: of several requests that touch one unfinished upload, only the latest goes on.

A client whose connection broke comes back on another one, often before the service has noticed. So
a new request ends the one before it, and waits until what that has received is written.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Who has the turn for which upload; for one event loop."""

    def __init__(self) -> None:
        self._current: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}

    @asynccontextmanager
    async def take(self, upload: str) -> AsyncIterator[asyncio.Event]:
        """Hold the turn while the context lasts; the event is set when another request wants it."""
        while (before := self._current.get(upload)) is not None:
            wanted, ended = before
            wanted.set()
            await ended.wait()
        self._current[upload] = wanted, ended = asyncio.Event(), asyncio.Event()
        try:
            yield wanted
        finally:
            del self._current[upload]
            ended.set()
