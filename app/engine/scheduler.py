"""Decides which tiles of which requests form the next batch: the policy, and nothing else.

The unit of work on the device is the tile, not the request, so scans of any size share a batch. The
policy is processor sharing: every active request contributes one tile in turn, so a scan of one
tile overtakes a scan of a hundred after at most one batch per competitor. Slots left over go to the
request with the earliest deadline, else to the oldest. There is no delay timer: a batch is never
held back to be filled, and no slot stays empty while a tile waits.

Only tiles of one **lane** (a network and a tile shape) can share a batch. Lanes share the device in
proportion to their active requests, by start-time fair queueing (Goyal et al. 1996): each lane has
a virtual time that advances by the cost of its batches per active request, and the lane with the
smallest goes next.

Pure Python: no torch, no HTTP, no threads, no clock but the one that is passed in.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Request = TypeVar("Request", bound=Hashable)


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

    number: int
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


@dataclass(slots=True)
class _Lane(Generic[Request]):
    """The requests of a lane with waiting tiles, in turn, and the lane's virtual time."""

    virtual_time: float
    waiting: OrderedDict[Request, _Entry] = field(default_factory=OrderedDict)


def _unit_cost(lane: Hashable) -> float:
    del lane
    return 1.0


class Scheduler(Generic[Request]):
    """The requests and their waiting tiles."""

    def __init__(
        self, batch_size: Callable[[Hashable], int], cost: Callable[[Hashable], float] = _unit_cost
    ) -> None:
        """Start empty.

        Args:
            batch_size: Maximum number of tiles in a batch of a lane; called for every batch.
            cost: What one tile of a lane costs, in any unit above 0.
        """
        self._batch_size = batch_size
        self._cost = cost
        self._entries: dict[Request, _Entry] = {}
        self._lanes: OrderedDict[Hashable, _Lane[Request]] = OrderedDict()
        self._idle_virtual_times: dict[Hashable, float] = {}
        self._virtual_time = 0.0
        self._count = 0

    def add(self, request: Request, deadline: float | None = None) -> None:
        """Add a request, whose tiles may follow later.

        Args:
            request: The request, which is not in the scheduler.
            deadline: Time, on the caller's clock, after which nobody waits for the answer.

        Raises:
            ValueError: The request is in the scheduler already.
        """
        if request in self._entries:
            raise ValueError(f"expected a new request, got one that was added before: {request!r}")
        self._entries[request] = _Entry(self._count, math.inf if deadline is None else deadline)
        self._count += 1

    def add_tiles(self, request: Request, lane: Hashable, tiles: int) -> None:
        """Add the tiles of a request, or those of its next pass once all before them are taken.

        Args:
            request: The request, which is in the scheduler.
            lane: Lane of its tiles.
            tiles: How many there are.

        Raises:
            ValueError: There are no tiles, or earlier ones still wait.
        """
        entry = self._entries[request]
        if tiles < 1 or entry.waiting:
            raise ValueError(f"expected tiles, and none before, got {tiles} after {entry.waiting}")
        entry.lane, entry.tiles, entry.next_tile = lane, tiles, 0
        if lane not in self._lanes:
            # A lane that was idle gains nothing by it.
            virtual_time = self._idle_virtual_times.pop(lane, 0.0)
            self._lanes[lane] = _Lane(max(self._virtual_time, virtual_time))
        self._lanes[lane].waiting[request] = entry

    def remove(self, request: Request) -> int:
        """Remove a request that is answered, cancelled, failed or expired.

        Returns:
            How many of its tiles will not be run; 0 for a request that is not in the scheduler.
        """
        entry = self._entries.pop(request, None)
        if entry is None:
            return 0
        if entry.waiting:
            self._leave_lane(request, entry)
        return entry.waiting

    def set_deadline(self, request: Request, deadline: float) -> None:
        """Change the deadline of a request, if it is in the scheduler."""
        if request in self._entries:
            self._entries[request].deadline = deadline

    def expired(self, now: float) -> tuple[Request, ...]:
        """List the requests whose deadline has passed, the oldest first."""
        return tuple(request for request, entry in self._entries.items() if now >= entry.deadline)

    @property
    def waiting_tiles(self) -> int:
        """Number of tiles that no batch has taken yet."""
        return sum(entry.waiting for entry in self._entries.values())

    @property
    def backlog(self) -> float:
        """Cost of the waiting tiles."""
        waiting = (entry for entry in self._entries.values() if entry.waiting)
        return sum(entry.waiting * self._cost(entry.lane) for entry in waiting)

    def estimate_cost(self, lane: Hashable, tiles: int) -> float:
        """Estimate the cost of everything that runs until a new request's last tile has run.

        Args:
            lane: Lane of the request.
            tiles: How many tiles it would have.

        Returns:
            Cost of its tiles, and of as many of every other request as come in turn.
        """
        others = (entry for entry in self._entries.values() if entry.waiting)
        in_turn = sum(min(entry.waiting, tiles) * self._cost(entry.lane) for entry in others)
        return in_turn + tiles * self._cost(lane)

    def next_batch(self, now: float) -> Batch[Request] | None:
        """Take the tiles to run now.

        The lane with the smallest virtual time goes next; of equals, the one that waited longest.

        Args:
            now: The caller's clock. Requests past their deadline give no tiles; their slots go to
                others. They stay until ``remove``.

        Returns:
            The batch; None when nothing can run.
        """
        ready = [(name, lane) for name, lane in self._lanes.items() if self._active(lane, now)]
        if not ready:
            return None
        name, lane = min(ready, key=lambda item: item[1].virtual_time)
        self._virtual_time = max(self._virtual_time, lane.virtual_time)
        self._idle_virtual_times = {
            key: time for key, time in self._idle_virtual_times.items() if time > self._virtual_time
        }
        self._lanes.move_to_end(name)
        return Batch(name, tuple(self._take_tiles(name, lane, self._active(lane, now))))

    def _take_tiles(
        self, name: Hashable, lane: _Lane[Request], active: Sequence[Request]
    ) -> list[tuple[Request, int]]:
        """Take one tile of each request in turn, then fill up with the most urgent."""
        slots = self._batch_size(name)
        tiles: list[tuple[Request, int]] = []
        for request in active[:slots]:
            tiles.append((request, lane.waiting[request].take()))
            # Served requests go behind the others, so turns rotate from batch to batch.
            lane.waiting.move_to_end(request)
        entries = self._entries
        urgent = sorted(active, key=lambda one: (entries[one].deadline, entries[one].number))
        for request in urgent:
            entry = lane.waiting[request]
            while entry.waiting and len(tiles) < slots:
                tiles.append((request, entry.take()))
        lane.virtual_time += self._cost(name) * len(tiles) / len(active)
        for request in active:
            if not entries[request].waiting:
                self._leave_lane(request, entries[request])
        return tiles

    def _active(self, lane: _Lane[Request], now: float) -> list[Request]:
        """List the requests of a lane whose deadline has not passed, in turn."""
        return [request for request, entry in lane.waiting.items() if now < entry.deadline]

    def _leave_lane(self, request: Request, entry: _Entry) -> None:
        """Take a request out of its lane, and remove the lane if it is empty."""
        lane = self._lanes[entry.lane]
        del lane.waiting[request]
        if not lane.waiting:
            self._idle_virtual_times[entry.lane] = lane.virtual_time
            del self._lanes[entry.lane]
