"""Semaphore -> a place for one decoded volume, taken and left once."""

import asyncio

from app.errors import DeadlineExceeded


class Place:
    """A place that is left early, where its volume need not be kept, or else at the end."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        """Args: as many places as there are; none is taken yet."""
        self._places = places
        self._taken = False

    async def take(self, deadline: float) -> None:
        """Wait for a place; whoever came first gets the next.

        Args:
            deadline: Of the event loop's clock.

        Raises:
            DeadlineExceeded: There was none until then.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._places.acquire()
                self._taken = True
        except TimeoutError:
            raise DeadlineExceeded("expected a place in the queue in time, got none") from None

    def leave(self) -> None:
        """Let the next one have the place; the second time does nothing."""
        if self._taken:
            self._taken = False
            self._places.release()
