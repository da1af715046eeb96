"""Chooses how many tiles of a lane to run in one batch, from the times that real batches took.

Batching a 3D network pays twofold or not at all, depending on device and precision, so the size is
measured: full batches of 1, 2, 4, 8… tiles are timed as they come, for as long as each size is
faster per tile than those before it; then the smallest within 5 % of the fastest stays. Nothing is
run for the measurement's sake, so a start costs nothing and an idle service rests. No batch is
tried that would keep a small scan waiting for too long.

The device's thread writes, the event loop reads; one lock guards the table of lanes.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from app.io import BatchInfo

MIN_SPEEDUP: Final = 1.05
"""A larger batch must be this much faster per tile; less is not worth making others wait."""

MAX_BATCH_S: Final = 0.06
"""Longest batch of several tiles: a scan that arrives waits for the batch that runs. Accelerators
are fully used long before; a CPU's larger batches gain less than they cost others."""

MIN_TIMINGS: Final = 3
"""Batches timed of each size; the fastest counts, as others were disturbed."""

MAX_TILES: Final = 64
MAX_LANES: Final = 256
"""Models that see scans whole have a lane for every shape; the least recently used are dropped."""

SMOOTHING: Final = 0.8
"""Weight of the past in the running mean of a tile's cost: about the last five batches count."""

MAX_SLOWDOWN: Final = 2.0
"""How many times slower than the fastest a tile is expected to be. A machine that was once held up
must not be expected to be slow for ever: scans that are refused for it are never timed again."""

DEFAULT_TILE_S: Final = 0.1
"""Assumed cost of a tile before any was timed; only the order of lanes depends on it."""


@dataclass(slots=True)
class _Lane:
    """What was measured of a lane."""

    size: int
    max_size: int
    tile_s: float | None = None
    settled: bool = False
    counts: dict[int, int] = field(default_factory=dict)
    best: dict[int, float] = field(default_factory=dict)

    @property
    def cost(self) -> float | None:
        """Expected time of a tile; None before any was timed."""
        if self.tile_s is None or not self.best:
            return self.tile_s
        fastest = min(seconds / tiles for tiles, seconds in self.best.items())
        return min(self.tile_s, MAX_SLOWDOWN * fastest)


def _voxels(lane: Hashable) -> int:
    """Return the voxels of a lane's tiles; a lane is a pair that ends with their shape."""
    return math.prod(lane[-1]) if isinstance(lane, tuple) else 1


class BatchSizes:
    """The batch size of every lane of one device, and the cost of its tiles."""

    def __init__(self, fixed: int = 0, memory_headroom: Callable[[], float] = lambda: 2.0) -> None:
        """Start with nothing measured.

        Args:
            fixed: Maximum number of tiles in a batch, whatever is measured; 0: as measured.
            memory_headroom: Returns how many times larger the last batch could have been.
        """
        self._fixed = fixed
        self._memory_headroom = memory_headroom
        self._lock = threading.Lock()
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()

    def size(self, lane: Hashable) -> int:
        """Return how many tiles a batch of a lane may hold."""
        with self._lock:
            return self._get_or_add(lane).size

    def cost(self, lane: Hashable) -> float:
        """Estimate how many seconds a tile of a lane takes; of an unknown lane, by its voxels."""
        with self._lock:
            known = self._lanes.get(lane)
            if known is not None and known.cost is not None:
                return known.cost
            costs = {one: lane.cost for one, lane in self._lanes.items() if lane.cost is not None}
            if not costs:
                return DEFAULT_TILE_S
            return sum(costs.values()) * _voxels(lane) / sum(map(_voxels, costs))

    def is_measured(self, lane: Hashable) -> bool:
        """Return whether the cost of a lane is known well enough to refuse scans by it."""
        with self._lock:
            known = self._lanes.get(lane)
            return known is not None and bool(known.best)

    @property
    def mean_cost(self) -> float:
        """Estimate how many seconds a tile takes, of whatever lane."""
        with self._lock:
            known = [lane.cost for lane in self._lanes.values() if lane.cost is not None]
            return sum(known) / len(known) if known else DEFAULT_TILE_S

    @property
    def largest(self) -> int:
        """The batch size of the lane that has the largest."""
        with self._lock:
            return max((lane.size for lane in self._lanes.values()), default=self._fixed or 1)

    def observe(self, lane: Hashable, tiles: int, seconds: float) -> None:
        """Record the time that a batch took."""
        with self._lock:
            known = self._get_or_add(lane)
            tile_s = seconds / tiles
            past = tile_s if known.tile_s is None else known.tile_s
            known.tile_s = SMOOTHING * past + (1 - SMOOTHING) * tile_s
            known.counts[tiles] = known.counts.get(tiles, 0) + 1
            # The first batch of a size also chooses kernels and fills caches.
            if known.counts[tiles] > 1:
                known.best[tiles] = min(seconds, known.best.get(tiles, seconds))
            if not known.settled and known.counts.get(known.size, 0) > MIN_TIMINGS:
                self._update_size(known)

    def limit(self, lane: Hashable, max_size: int) -> None:
        """Never again allow batches of a lane with more tiles than this: memory ran out."""
        with self._lock:
            known = self._get_or_add(lane)
            known.max_size = min(known.max_size, max_size)
            known.size = min(known.size, known.max_size)

    def timings(self, model: Hashable) -> list[BatchInfo]:
        """List what was measured of a model; its lanes are pairs that begin with its digest.

        Returns:
            By tile shape and number of tiles.
        """
        with self._lock:
            return [
                BatchInfo(
                    tile_shape=lane[-1], tiles=tiles, seconds=seconds, chosen=tiles == known.size
                )
                for lane, known in self._lanes.items()
                if isinstance(lane, tuple) and lane[0] == model
                for tiles, seconds in sorted(known.best.items())
            ]

    def _update_size(self, known: _Lane) -> None:
        """Try twice as many tiles, or settle for the smallest size that is about the fastest."""
        per_tile = {size: known.best[size] / size for size in known.best if size <= known.size}
        smaller = [seconds for size, seconds in per_tile.items() if size < known.size]
        is_faster = not smaller or per_tile[known.size] * MIN_SPEEDUP < min(smaller)
        is_short = 2 * known.best[known.size] <= MAX_BATCH_S
        may_grow = is_faster and is_short and 2 * known.size <= known.max_size
        # Asked last: on CUDA asking also starts a new measurement of the peak.
        if may_grow and self._memory_headroom() >= 2:
            known.size *= 2
            return
        limit = MIN_SPEEDUP * min(per_tile.values())
        known.size = min(size for size, seconds in per_tile.items() if seconds <= limit)
        known.settled = True

    def _get_or_add(self, lane: Hashable) -> _Lane:
        """Return what is known of a lane, as the one used last."""
        if lane not in self._lanes:
            max_size = self._fixed or MAX_TILES
            self._lanes[lane] = _Lane(self._fixed or 1, max_size, settled=bool(self._fixed))
            if len(self._lanes) > MAX_LANES:
                self._lanes.popitem(last=False)
        self._lanes.move_to_end(lane)
        return self._lanes[lane]
