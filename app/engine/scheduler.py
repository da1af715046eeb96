"""Tiles of all requests -> the next device batch: the policy, and nothing else.

The unit of device work is the tile, not the request, so volumes of any shape share a batch. The
policy is processor sharing: every active request gives one tile in turn, so a scan of one tile
passes a scan of a hundred after at most one batch per competitor; slots left over go to the request
with the earliest deadline, else to the oldest. There is no delay timer: a batch is never held back
for company, and no slot stays empty while a tile waits.

Tiles can share a batch only within a **lane** (one model and one tile shape). Lanes share the
device by the number of their active requests: each is charged what its batch costs per request, and
the lane that was charged least goes next (start-time fair queueing, Goyal et al. 1996).

Pure Python: no torch, no HTTP, no clock but the one that is passed in.
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
class _Held:
    """A request: its deadline, and its tiles that no batch holds yet."""

    age: int
    deadline: float
    lane: Hashable = None
    tiles: int = 0
    next_tile: int = 0

    @property
    def left(self) -> int:
        return self.tiles - self.next_tile

    def take(self) -> int:
        self.next_tile += 1
        return self.next_tile - 1


@dataclass(slots=True)
class _Lane(Generic[Request]):
    """The requests of a lane with tiles that wait, in turn, and what it was charged so far."""

    charged: float
    waiting: OrderedDict[Request, _Held] = field(default_factory=OrderedDict)


def _alike(lane: Hashable) -> float:
    """Charge every tile the same."""
    del lane
    return 1.0


class Scheduler(Generic[Request]):
    """Hold the requests and their tiles, and choose which tiles go next."""

    def __init__(
        self, batch_size: Callable[[Hashable], int], cost: Callable[[Hashable], float] = _alike
    ) -> None:
        """Begin with nothing.

        Args:
            batch_size: Most tiles in a batch of a lane; asked for every batch.
            cost: What one tile of a lane costs, in any unit above 0.
        """
        self._batch_size = batch_size
        self._cost = cost
        self._held: dict[Request, _Held] = {}
        self._lanes: OrderedDict[Hashable, _Lane[Request]] = OrderedDict()
        self._owed: dict[Hashable, float] = {}
        self._clock = 0.0
        self._ages = 0

    def hold(self, request: Request, deadline: float | None = None) -> None:
        """Accept a request, whose tiles may come later.

        Args:
            request: Names the request; not held already.
            deadline: Time, on the caller's clock, after which nobody waits for the answer.

        Raises:
            ValueError: The request is held already.
        """
        if request in self._held:
            raise ValueError(f"expected a new request, got one that is held: {request!r}")
        self._held[request] = _Held(self._ages, math.inf if deadline is None else deadline)
        self._ages += 1

    def offer(self, request: Request, lane: Hashable, tiles: int) -> None:
        """Accept tiles of a request; further ones, counted anew, once all before them are taken.

        Args:
            request: Is held.
            lane: What its tiles must have in common with their batch.
            tiles: How many there are.

        Raises:
            ValueError: There are no tiles, or earlier ones still wait.
        """
        held = self._held[request]
        if tiles < 1 or held.left:
            raise ValueError(f"expected tiles, and none before, got {tiles} after {held.left}")
        held.lane, held.tiles, held.next_tile = lane, tiles, 0
        self._queue(request, held)

    def remove(self, request: Request) -> int:
        """Forget a request: it is answered, cancelled, failed or late.

        Returns:
            How many of its tiles will not be run; 0 for a request that is not held.
        """
        held = self._held.pop(request, None)
        if held is None:
            return 0
        if held.left:
            self._unqueue(request, held)
        return held.left

    def set_deadline(self, request: Request, deadline: float) -> None:
        """Change the time after which nobody waits for a request's answer, if it is held."""
        if request in self._held:
            self._held[request].deadline = deadline

    def late(self, now: float) -> tuple[Request, ...]:
        """List the requests whose deadline has passed, the oldest first."""
        return tuple(request for request, held in self._held.items() if now >= held.deadline)

    @property
    def waiting_tiles(self) -> int:
        """Count the tiles that no batch holds yet."""
        return sum(held.left for held in self._held.values())

    @property
    def backlog(self) -> float:
        """Add up what the waiting tiles cost."""
        waiting = (held for held in self._held.values() if held.left)
        return sum(held.left * self._cost(held.lane) for held in waiting)

    def foresee(self, lane: Hashable, tiles: int) -> float:
        """Say what will have been run when a new request's last tile has, at what cost.

        Args:
            lane: Of the request.
            tiles: How many it would have.

        Returns:
            Cost of its tiles, and of as many of everybody else's as come in turn.
        """
        others = (held for held in self._held.values() if held.left)
        turns = sum(min(held.left, tiles) * self._cost(held.lane) for held in others)
        return turns + tiles * self._cost(lane)

    def next_batch(self, now: float) -> Batch[Request] | None:
        """Choose the tiles that run now, and forget them.

        The lane that was charged least goes next; of equals, the one that waited longer.

        Args:
            now: The caller's clock. Requests past their deadline give no tiles; their slots go to
                others. They stay until ``remove``.

        Returns:
            The batch; None when nothing can run.
        """
        ready = [(name, lane) for name, lane in self._lanes.items() if self._active(lane, now)]
        if not ready:
            return None
        name, lane = min(ready, key=lambda item: item[1].charged)
        self._clock = max(self._clock, lane.charged)
        self._owed = {key: owed for key, owed in self._owed.items() if owed > self._clock}
        self._lanes.move_to_end(name)
        return Batch(name, tuple(self._fill(name, lane, self._active(lane, now))))

    def _fill(
        self, name: Hashable, lane: _Lane[Request], active: Sequence[Request]
    ) -> list[tuple[Request, int]]:
        """Take one tile of each in turn, then fill up with the most urgent; charge the lane."""
        slots = self._batch_size(name)
        tiles: list[tuple[Request, int]] = []
        for request in active[:slots]:
            tiles.append((request, lane.waiting[request].take()))
            # Whoever was served goes behind whoever was not, so turns rotate across batches.
            lane.waiting.move_to_end(request)
        urgent = sorted(active, key=lambda one: (self._held[one].deadline, self._held[one].age))
        for request in urgent:
            held = lane.waiting[request]
            while held.left and len(tiles) < slots:
                tiles.append((request, held.take()))
        lane.charged += self._cost(name) * len(tiles) / len(active)
        for request in active:
            if not self._held[request].left:
                self._unqueue(request, self._held[request])
        return tiles

    def _active(self, lane: _Lane[Request], now: float) -> list[Request]:
        """List the requests of a lane that somebody waits for, in turn."""
        return [request for request, held in lane.waiting.items() if now < held.deadline]

    def _queue(self, request: Request, held: _Held) -> None:
        """Put a request in its lane; a lane that was empty gains nothing by having been."""
        if held.lane not in self._lanes:
            owed = self._owed.pop(held.lane, 0.0)
            self._lanes[held.lane] = _Lane(max(self._clock, owed))
        self._lanes[held.lane].waiting[request] = held

    def _unqueue(self, request: Request, held: _Held) -> None:
        """Take a request out of its lane, and the lane away if it is empty."""
        lane = self._lanes[held.lane]
        del lane.waiting[request]
        if not lane.waiting:
            self._owed[held.lane] = lane.charged
            del self._lanes[held.lane]
