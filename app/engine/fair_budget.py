"""Something that there is a fixed amount of, such as memory, shared fairly among clients.

Who needs some of it reserves all of it at once, so that no two wait for each other with half of
what they need. What does not fit now waits within its deadline. Of those that wait, the client that
holds least comes first. A small request may pass a large one that does not fit yet, but not for
ever: one that has waited PATIENCE_S is passed by nobody.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from app.errors import DeadlineExceeded

PATIENCE_S: Final = 5.0
"""A request that has waited so long is not passed by smaller ones any more."""


@dataclass(eq=False, slots=True)
class Reservation:
    """A part of a budget that is waited for or held.

    Attributes:
        client: Who asks for it.
        amount: How much.
        since: When it was asked for, by the event loop's clock.
        granted: Done once it is held.
    """

    client: str
    amount: int
    since: float
    granted: asyncio.Future[None]


class FairBudget:
    """An amount that several clients share; for one event loop.

    Attributes:
        limit: The amount.
        held: How much each client holds; a client that holds nothing is not in it.
    """

    def __init__(self, limit: int, max_share: float = 1.0) -> None:
        """Start with nothing held.

        Args:
            limit: The amount.
            max_share: How much of it one client may hold if it holds anything already.
        """
        self.limit = limit
        self.held: Counter[str] = Counter()
        self._share = int(limit * max_share)
        self._waiting: list[Reservation] = []

    @property
    def used(self) -> int:
        """How much is held."""
        return self.held.total()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, amount: int, client: str, deadline: float) -> AsyncIterator[Reservation]:
        """Hold some of the budget while the context lasts, or until ``release``.

        Args:
            amount: How much, at most ``limit``.
            client: Who asks for it.
            deadline: On the event loop's clock.

        Raises:
            DeadlineExceeded: Others held too much until then.
        """
        loop = asyncio.get_running_loop()
        reservation = Reservation(client, amount, loop.time(), loop.create_future())
        self._waiting.append(reservation)
        self._grant()
        try:
            await asyncio.wait([reservation.granted], timeout=max(0.0, deadline - loop.time()))
            if not reservation.granted.done():
                raise DeadlineExceeded("expected a turn in time, but other requests had it")
            yield reservation
        finally:
            self.release(reservation)

    def release(self, reservation: Reservation) -> None:
        """Give a reservation back; a second call does nothing."""
        if reservation in self._waiting:
            self._waiting.remove(reservation)
        else:
            self.held[reservation.client] -= reservation.amount
            self.held += Counter()  # Drops clients that hold nothing.
        reservation.amount = 0
        self._grant()

    def _grant(self) -> None:
        """Grant what fits, in the order of fairness."""
        now = asyncio.get_running_loop().time()
        while self._waiting:
            self._waiting.sort(key=lambda one: (self.held[one.client], one.since))
            fitting = [one for one in self._waiting if self._fits(one)]
            oldest = min(self._waiting, key=lambda one: one.since)
            if now - oldest.since > PATIENCE_S and self._is_within_share(oldest):
                fitting = [one for one in fitting if one is oldest]
            if not fitting:
                return
            self._waiting.remove(fitting[0])
            self.held[fitting[0].client] += fitting[0].amount
            fitting[0].granted.set_result(None)

    def _fits(self, reservation: Reservation) -> bool:
        fits = self.used + reservation.amount <= self.limit
        return fits and self._is_within_share(reservation)

    def _is_within_share(self, reservation: Reservation) -> bool:
        held = self.held[reservation.client]
        return not held or held + reservation.amount <= self._share
