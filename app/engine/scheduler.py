"""Decides which tiles of which requests form the next batch: the policy, and nothing else.

The unit of work on the device is the tile, not the request, so scans of any size share a batch. The
policy is start-time fair queueing (Goyal et al. 1996) on three levels:

1. **Clients** share the device evenly: each has a virtual time that advances by the cost of its
   tiles, and the client with the smallest goes next. So many scans of one client do not delay the
   only scan of another.
2. Only tiles of one **lane** (a network and a tile shape) can share a batch. The lanes in which a
   client has tiles share its turns in proportion to their active requests.
3. The slots of a batch go to the clients of the lane in the same way. The **requests** of a client
   contribute one tile in turn, so a scan of one tile overtakes a scan of a hundred after at most
   one batch per competitor; once each has, the one with the earliest deadline contributes more.

A pass on a CPU that takes long is interrupted for scans that count much less, in the same order:
preemption at the layers of its network, for at most as long as it takes itself.

Work that nobody waits for at a connection is that of one more client, ``BACKGROUND``, whose tiles
count several times: it gets a small share while others want the device, and all of it otherwise.
The share is not 0, because such work holds memory until it is done.

There is no delay timer: a batch is never held back to be filled, and no slot stays empty while a
tile waits. Where batches run side by side, each request takes part in one at a time, so that one
with many tiles leaves room to others.

Pure Python: no torch, no HTTP, no threads, no clock but the one that is passed in.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

BACKGROUND: Final = "background"
"""The client of all work that nobody waits for; no key's hash and no address reads so."""

BACKGROUND_PRICE: Final = 4
"""What a tile of that client counts; beside one other client it gets a fifth of the device."""

Request = TypeVar("Request", bound=Hashable)

SMALLER: Final = 2.0
"""A batch is interrupted for requests that cost so many times less than its own still do."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[Request]):
    """Tiles to run together.

    Attributes:
        lane: What the tiles have in common.
        tiles: Request and tile index of every slot.
    """

    lane: Hashable
    tiles: tuple[tuple[Request, int], ...]

    def requests(self) -> tuple[Request, ...]:
        """List the requests in the batch, each once."""
        return tuple(dict.fromkeys(request for request, _ in self.tiles))


@dataclass(slots=True)
class _Entry:
    """A request: its deadline, and its tiles that no batch has taken yet."""

    client: Hashable
    deadline: float
    lane: Hashable = None
    tiles: int = 0
    next_tile: int = 0

    @property
    def waiting(self) -> int:
        return self.tiles - self.next_tile

    def take(self) -> int:
        self.next_tile += 1
        return self.next_tile - 1


class _FairShares:
    """Virtual times of parties that share the device; the one with the smallest goes next.

    A party that was idle gains nothing by it.
    """

    def __init__(self) -> None:
        self._times: dict[Hashable, float] = {}  # Whoever went last stands last.
        self._idle_times: dict[Hashable, float] = {}
        self._now = 0.0

    def join(self, party: Hashable) -> None:
        if party not in self._times:
            self._times[party] = max(self._now, self._idle_times.pop(party, 0.0))

    def keep(self, parties: Set[Hashable]) -> None:
        """Let all others leave."""
        if not parties and self._idle_times:
            # Of those that came one by one, each at the same time, all would be kept for ever.
            self._now = max(self._now, min(self._idle_times.values()))
        for party in [one for one in self._times if one not in parties]:
            self._idle_times[party] = self._times.pop(party)

    def advance(self, party: Hashable, cost: float) -> None:
        self._times[party] += cost

    def smallest(self, among: Container[Hashable]) -> Hashable:
        """Return the party to go next; of equals, the one that waited longest."""
        return min((one for one in self._times if one in among), key=self._times.__getitem__)

    def start_turn(self, party: Hashable) -> None:
        # Not the time of the party: some are ahead of others that wait, as they filled slots, or
        # interrupted a batch, that these could not. Who joins is not to wait until those are level.
        self._now = max(self._now, min(self._times.values()))
        self._times[party] = self._times.pop(party)
        self._idle_times = {one: idle for one, idle in self._idle_times.items() if idle > self._now}


def _price(client: Hashable) -> int:
    return BACKGROUND_PRICE if client == BACKGROUND else 1


class Scheduler(Generic[Request]):
    """The requests and their waiting tiles."""

    def __init__(
        self,
        batch_size: Callable[[Hashable], int],
        cost: Callable[[Hashable], float],
        *,
        batches: int = 1,
    ) -> None:
        """Start empty.

        Args:
            batch_size: Maximum number of tiles in a batch of a lane; called for every batch.
            cost: What one tile of a lane costs, in any unit above 0.
            batches: How many run side by side; if several, no request has tiles in two of them, and
                ``end`` is to be called with each.
        """
        self._side_by_side = batches > 1
        self._running: list[Batch[Request]] = []
        self._batch_size = batch_size
        self._cost = cost
        self._entries = OrderedDict[Request, _Entry]()  # Whose turn comes last stands last.
        self._lane_shares = _FairShares()
        self._client_shares = _FairShares()

    def add(self, request: Request, deadline: float = math.inf, client: Hashable = None) -> None:
        """Add a request, whose tiles may follow later.

        Args:
            request: The request, which is not in the scheduler.
            deadline: Time, on the caller's clock, after which nobody waits for the answer.
            client: Who sent it.

        Raises:
            ValueError: The request is in the scheduler already.
        """
        if request in self._entries:
            raise ValueError(f"expected a new request, got one that was added before: {request!r}")
        self._entries[request] = _Entry(client, deadline)

    def add_tiles(self, request: Request, lane: Hashable, tiles: int) -> None:
        """Add the tiles of a request, or those of its next pass once all before them are taken.

        Raises:
            ValueError: There are no tiles, or earlier ones still wait.
        """
        entry = self._entries[request]
        if tiles < 1 or entry.waiting:
            raise ValueError(f"expected tiles, and none before, got {tiles} after {entry.waiting}")
        entry.lane, entry.tiles, entry.next_tile = lane, tiles, 0
        # Not before: a client all of whose scans are being prepared is idle.
        self._client_shares.join(entry.client)
        self._lane_shares.join(lane)
        self._entries.move_to_end(request)

    def remove(self, request: Request) -> int:
        """Remove a request that is answered, cancelled, failed or expired.

        Returns:
            How many of its tiles will not be run; 0 for a request that is not in the scheduler.
        """
        entry = self._entries.pop(request, None)
        return 0 if entry is None else entry.waiting

    def set_deadline(self, request: Request, deadline: float) -> None:
        """Change the deadline of a request, if it is in the scheduler."""
        if request in self._entries:
            self._entries[request].deadline = deadline

    @property
    def waiting_tiles(self) -> int:
        """Number of tiles that no batch has taken yet."""
        return sum(entry.waiting for entry in self._entries.values())

    @property
    def backlog(self) -> float:
        """Cost of the waiting tiles."""
        waiting = (entry for entry in self._entries.values() if entry.waiting)
        return sum(entry.waiting * self._cost(entry.lane) for entry in waiting)

    def estimate_cost(self, lane: Hashable, tiles: int, client: Hashable = None) -> float:
        """Estimate the cost of everything that runs until a new request's last tile has run.

        Returns:
            Cost of its tiles, of as many of the client's other requests as come in turn, and of
            every other client's share meanwhile.
        """
        own = tiles * self._cost(lane)
        others: dict[Hashable, float] = {}
        for entry in self._entries.values():
            cost = self._cost(entry.lane) if entry.waiting else 0.0
            if entry.client == client:
                own += min(entry.waiting, tiles) * cost
            else:
                others[entry.client] = others.get(entry.client, 0.0) + entry.waiting * cost
        shares = {other: own * _price(client) / _price(other) for other in others}
        return own + sum(min(cost, shares[other]) for other, cost in others.items())

    def next_batch(self, now: float) -> Batch[Request] | None:
        """Take the tiles to run now.

        Args:
            now: The caller's clock. Requests past their deadline give no tiles; their slots go to
                others. They stay until ``remove``.

        Returns:
            The batch; None when nothing can run.
        """
        return self._take_batch(self._ready(now))

    def interrupting_batch(
        self, running: Batch[Request], spare: float, now: float
    ) -> Batch[Request] | None:
        """Take tiles of requests that need not wait for the end of a batch that runs.

        Args:
            running: The batch.
            spare: What they may cost at most, all together.
            now: The caller's clock.

        Returns:
            Tiles of requests that cost much less than what is left of the smallest in the running
            batch; None if there are none.
        """
        most = min(spare, min(self._costs(running)) / SMALLER)
        own = running.requests()
        return self._take_batch(
            {
                request: entry
                for request, entry in self._ready(now).items()
                if request not in own
                and _price(entry.client) * entry.waiting * self._cost(entry.lane) <= most
            },
            spare,
        )

    def end(self, batch: Batch[Request]) -> None:
        """Let the requests of a batch that has run have tiles in another one."""
        if batch in self._running:
            self._running.remove(batch)

    def is_beside_smaller(self, running: Batch[Request]) -> bool:
        """Return whether a batch runs beside another of requests that cost much less."""
        most = min(self._costs(running)) / SMALLER
        others = (batch for batch in self._running if batch is not running)
        return any(max(self._costs(other)) <= most for other in others)

    def _costs(self, batch: Batch[Request]) -> list[float]:
        """Return what each request of a batch costs that runs, with its tiles that wait."""
        cost, costs = self._cost(batch.lane), []
        for request, tiles in Counter[Request](request for request, _ in batch.tiles).items():
            entry = self._entries.get(request)
            costs.append(
                cost * (_price(entry.client) * (tiles + entry.waiting) if entry else tiles)
            )
        return costs

    def _ready(self, now: float) -> dict[Request, _Entry]:
        """Find the requests that have waiting tiles, time left and no part in a running batch."""
        running = {request for batch in self._running for request in batch.requests()}
        return {
            request: entry
            for request, entry in self._entries.items()
            if entry.waiting and now < entry.deadline and request not in running
        }

    def _take_batch(
        self, ready: Mapping[Request, _Entry], most: float = math.inf
    ) -> Batch[Request] | None:
        """Take the next batch of some requests, if any; several tiles cost at most ``most``."""
        if not ready:
            return None
        entries = ready.values()
        client = self._client_shares.smallest({entry.client for entry in entries})
        lane = self._lane_shares.smallest({one.lane for one in entries if one.client == client})
        self._lane_shares.start_turn(lane)
        batch = Batch(lane, tuple(self._take_tiles(lane, ready, most)))
        if self._side_by_side:
            self._running.append(batch)
        return batch

    def _take_tiles(
        self, lane: Hashable, ready: Mapping[Request, _Entry], most: float
    ) -> list[tuple[Request, int]]:
        """Fill the slots of a batch from clients and their requests in turn."""
        active = {request: entry for request, entry in ready.items() if entry.lane == lane}
        slots, cost, requests = self._batch_size(lane), self._cost(lane), len(active)
        tiles: list[tuple[Request, int]] = []
        served: set[Request] = set()
        # At least one, as what a tile costs may just have been measured anew.
        while active and (not tiles or (len(tiles) < slots and (len(tiles) + 1) * cost <= most)):
            client = self._client_shares.smallest({entry.client for entry in active.values()})
            request = self._choose(client, active, served)
            tiles.append((request, active[request].take()))
            self._client_shares.start_turn(client)
            self._client_shares.advance(client, cost * _price(client))
            if request not in served:
                # Served requests go behind the others, so turns rotate from batch to batch.
                self._entries.move_to_end(request)
                served.add(request)
            if not active[request].waiting:
                del active[request]
        self._lane_shares.advance(lane, cost * len(tiles) / requests)
        self._leave_idle()
        return tiles

    def _choose(
        self, client: Hashable, active: Mapping[Request, _Entry], served: Container[Request]
    ) -> Request:
        """Choose the request of a client that contributes the next tile of a batch."""
        own = [request for request, entry in active.items() if entry.client == client]
        in_turn = next((request for request in own if request not in served), None)
        if in_turn is not None:
            return in_turn
        return min(own, key=lambda one: active[one].deadline)

    def _leave_idle(self) -> None:
        """Take clients and lanes of which no tile waits out of the turns."""
        waiting = [entry for entry in self._entries.values() if entry.waiting]
        self._client_shares.keep({entry.client for entry in waiting})
        self._lane_shares.keep({entry.lane for entry in waiting})
