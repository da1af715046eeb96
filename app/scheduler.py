"""Tiles of all requests -> the next device batch: the policy, and nothing else.

The unit of device work is the tile, not the request, so volumes of any shape share a batch. The
policy is processor sharing: every active request gives one tile in turn, so a scan of one tile
passes a scan of a hundred after at most one batch per competitor; slots left over go to the request
with the earliest deadline, else to the oldest. There is no delay timer: a batch is never held back
for company, and no slot stays empty while a tile waits. Tiles can share a batch only within a
**lane** (one model and one tile shape); lanes take turns.

Pure Python: no torch, no HTTP, no clock but the one that is passed in.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable
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
class _Waiting:
    """Tiles of one request that no batch holds yet."""

    tiles: int
    deadline: float
    next_tile: int = 0

    def take(self) -> int:
        self.next_tile += 1
        return self.next_tile - 1

    @property
    def left(self) -> int:
        return self.tiles - self.next_tile


@dataclass(slots=True)
class Scheduler(Generic[Request]):
    """Hold the tiles that wait, and choose which go next.

    Attributes:
        batch_size: Most tiles in a batch.
    """

    batch_size: int
    _lanes: OrderedDict[Hashable, OrderedDict[Request, _Waiting]] = field(
        default_factory=OrderedDict
    )

    def add(
        self, request: Request, lane: Hashable, tiles: int, deadline: float | None = None
    ) -> None:
        """Accept a request's tiles.

        Args:
            request: Names the request; not held already.
            lane: What its tiles must have in common with their batch.
            tiles: How many there are.
            deadline: Time, on the caller's clock, after which nobody waits for the answer.

        Raises:
            ValueError: The request is held already, or has no tiles.
        """
        if tiles < 1:
            raise ValueError(f"expected at least one tile, got {tiles}")
        if any(request in waiting for waiting in self._lanes.values()):
            raise ValueError(f"expected a new request, got one that is held: {request!r}")
        waiting = self._lanes.setdefault(lane, OrderedDict())
        waiting[request] = _Waiting(tiles, math.inf if deadline is None else deadline)

    def remove(self, request: Request) -> int:
        """Drop a request's waiting tiles: it was cancelled, failed or is late.

        Returns:
            How many tiles will not be run; 0 if none were waiting.
        """
        for lane, waiting in self._lanes.items():
            if request in waiting:
                left = waiting.pop(request).left
                if not waiting:
                    del self._lanes[lane]
                return left
        return 0

    def next_batch(self, now: float) -> Batch[Request] | None:
        """Choose the tiles that run next, and forget them.

        Args:
            now: The caller's clock. Requests past their deadline give no tiles; their slots go to
                others. They stay until ``remove``.

        Returns:
            The batch, or None when nothing can run.
        """
        for lane in list(self._lanes):
            waiting = self._lanes[lane]
            active = [request for request, held in waiting.items() if now < held.deadline]
            if not active:
                continue
            tiles = self._fill(waiting, active)
            self._lanes.move_to_end(lane)
            for request in [request for request in waiting if not waiting[request].left]:
                del waiting[request]
            if not waiting:
                del self._lanes[lane]
            return Batch(lane, tuple(tiles))
        return None

    def late(self, now: float) -> tuple[Request, ...]:
        """List the waiting requests whose deadline has passed."""
        return tuple(
            request
            for waiting in self._lanes.values()
            for request, held in waiting.items()
            if now >= held.deadline
        )

    @property
    def waiting_tiles(self) -> int:
        """Count the tiles that no batch holds yet."""
        return sum(held.left for lane in self._lanes.values() for held in lane.values())

    def _fill(
        self, waiting: OrderedDict[Request, _Waiting], active: list[Request]
    ) -> list[tuple[Request, int]]:
        """Take one tile of each in turn, then fill up with the most urgent."""
        served = active[: self.batch_size]
        tiles = [(request, waiting[request].take()) for request in served]
        # Whoever was served goes behind whoever was not, so turns rotate across batches.
        for request in served:
            waiting.move_to_end(request)
        # sorted() is stable, so among equal deadlines the oldest comes first.
        for request in sorted(active, key=lambda request: waiting[request].deadline):
            held = waiting[request]
            while held.left and len(tiles) < self.batch_size:
                tiles.append((request, held.take()))
        return tiles
