"""Something that there is a fixed amount of, such as memory, shared fairly among clients.

Who needs some of it waits for all of it at once, so that no two wait for each other with half of
what they need. What does not fit now waits within its deadline. Of those that wait, the client that
holds least comes first, then the oldest. One that does not fit yet is passed by those behind it,
but not for ever: once it has waited PATIENCE_S, only in every other PATIENCE_S. They would wait as
long as it does else, which may be long: for an answer that is read slowly.
"""

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from app.errors import DeadlineExceeded

PATIENCE_S: Final = 5.0
"""A request that has waited so long is not passed by those behind it, for so long at a time."""


@dataclass(eq=False, slots=True)
class Reservation:
    """A part of a budget that is waited for or held.

    Attributes:
        client: Who asks for it.
        amount: How much.
        since: When it was asked for, by the event loop's clock.
        granted: Done once it is held.
        users: Objects as long as which it is held, even if it is released before.
        kept: What is to be kept of it once there are none; None: it was not released.
    """

    client: str
    amount: int
    since: float
    granted: asyncio.Future[None]
    users: int = 0
    kept: int | None = None


class FairBudget:
    """An amount that several clients share; for one event loop.

    Attributes:
        limit: The amount.
        share: How much of it one client may hold if it holds anything already: the part
            ``max_share`` of it, rounded up.
        held: How much each client holds; a client that holds nothing is not in it.
    """

    def __init__(self, limit: int, max_share: float = 1.0) -> None:
        self.limit = limit
        self.share = math.ceil(limit * max_share)
        self.held: Counter[str] = Counter()
        self._waiting: list[Reservation] = []

    @property
    def used(self) -> int:
        """How much is held."""
        return self.held.total()

    @property
    def waiting(self) -> int:
        """How many wait for some of it."""
        return len(self._waiting)

    def fits(self, amount: int, client: str) -> bool:
        """Return whether a client may hold so much more now."""
        return self.used + amount <= self.limit and self._is_within_share(amount, client)

    def add(self, amount: int, client: str) -> None:
        """Let a client hold more, or less, at once."""
        self.held[client] += amount
        self.held += Counter()  # Drops clients that hold nothing.

    async def reserve(self, amount: int, client: str, deadline: float) -> Reservation:
        """Wait for some of the budget, at most ``limit``, to hold it until ``release``.

        Raises:
            DeadlineExceeded: Others held too much until then.
        """
        loop = asyncio.get_running_loop()
        reservation = Reservation(client, amount, loop.time(), loop.create_future())
        self._waiting.append(reservation)
        self._grant()
        try:
            with suppress(TimeoutError):  # Its frames hold the task, which holds what is raised.
                async with asyncio.timeout_at(deadline):
                    while not (await asyncio.wait([reservation.granted], timeout=PATIENCE_S))[0]:
                        self._grant()  # Those before it may be passed again.
                return reservation
        except BaseException:
            self.release(reservation)
            raise
        self.release(reservation)
        raise DeadlineExceeded("expected a turn in time (timeout_s), but other requests had it")

    @asynccontextmanager
    async def hold(self, amount: int, client: str, deadline: float) -> AsyncIterator[Reservation]:
        """Hold some of the budget while the context lasts; see ``reserve``."""
        reservation = await self.reserve(amount, client, deadline)
        try:
            yield reservation
        finally:
            self.release(reservation)

    @contextmanager
    def hold_while_used(self, reservation: Reservation, used: object) -> Iterator[None]:
        """Hold a reservation, where the context ends by an error, until an object is freed.

        It may be released before: threads go on with it for a while after nobody waits any more.
        """
        try:
            yield
        except BaseException:
            reservation.users += 1
            loop = asyncio.get_running_loop()
            weakref.finalize(used, _call_soon, loop, self._end_use, reservation).atexit = False
            raise

    def _end_use(self, reservation: Reservation) -> None:
        reservation.users -= 1
        if reservation.kept is not None:
            self.release(reservation, reservation.kept)

    def release(self, reservation: Reservation, keep: int = 0) -> None:
        """Give a reservation back, but for what is to be kept; a second call does nothing."""
        if reservation.users:
            reservation.kept = keep
            return
        if reservation in self._waiting:
            self._waiting.remove(reservation)
        else:
            self.add(min(keep, reservation.amount) - reservation.amount, reservation.client)
        reservation.amount = min(keep, reservation.amount)
        self._grant()

    def _grant(self) -> None:
        """Grant what fits, in the order of fairness."""
        while (reservation := self._next()) is not None:
            self._waiting.remove(reservation)
            self.add(reservation.amount, reservation.client)
            reservation.granted.set_result(None)

    def _next(self) -> Reservation | None:
        """Choose the reservation to grant next; None if there is none that may be granted now."""
        now = asyncio.get_running_loop().time()
        for one in sorted(self._waiting, key=lambda one: (self.held[one.client], one.since)):
            if self.fits(one.amount, one.client):
                return one
            is_impatient = now - one.since > PATIENCE_S and now // PATIENCE_S % 2
            if is_impatient and self._is_within_share(one.amount, one.client):
                return None
        return None

    def _is_within_share(self, amount: int, client: str) -> bool:
        return not self.held[client] or self.held[client] + amount <= self.share


def _call_soon(
    loop: asyncio.AbstractEventLoop, call: Callable[[Reservation], None], argument: Reservation
) -> None:
    """Have something called on the loop, on whatever thread this is."""
    with suppress(RuntimeError):  # It is closed.
        loop.call_soon_threadsafe(call, argument)
