"""Times of real batches -> how many tiles the next batch of a lane may hold.

Batching a 3D network pays twofold or not at all, depending on device and precision, so the size is
measured: full batches of 1, 2, 4, 8… tiles are timed as they come, for as long as each size is
faster per tile than those before it; then the smallest within 5 % of the fastest stays. Nothing is
run for the measurement's sake, so a start costs nothing and an idle service rests. No batch is
tried that would take longer than what a small scan can be made to wait.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

GAIN: Final = 1.05
"""A larger batch must be this much faster per tile; less is not worth making others wait."""

PATIENCE_S: Final = 0.06
"""A batch of several tiles takes no longer, if it is known: so long does a scan that comes wait for
it. Accelerators are full long before; a CPU's larger batches gain less than they cost others."""

TIMINGS: Final = 3
"""Of each size, of which the fastest counts: others were disturbed."""

MOST_TILES: Final = 64
MOST_LANES: Final = 256
"""Models that see scans whole have a lane for every shape; the least used are forgotten."""

MEMORY: Final = 0.8
"""Weight of the past in the running mean of a tile's cost: about the last five batches count."""

UNKNOWN_S: Final = 0.1
"""What a tile is taken to cost before any was timed; only lanes' turns depend on it."""


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """What a batch of so many tiles takes, at best.

    Attributes:
        tile_shape: Voxels of each tile.
        tiles: In the batch.
        seconds: For the whole batch.
        chosen: Whether this is how many tiles a batch now has at most.
    """

    tile_shape: tuple[int, int, int]
    tiles: int
    seconds: float
    chosen: bool


@dataclass(slots=True)
class _Lane:
    """What was measured of a lane."""

    size: int
    most: int
    tile_s: float | None = None
    settled: bool = False
    counts: dict[int, int] = field(default_factory=dict)
    best: dict[int, float] = field(default_factory=dict)


class BatchSizes:
    """The batch size of every lane, and the cost of its tiles."""

    def __init__(self, fixed: int = 0, room: Callable[[], float] = lambda: 2.0) -> None:
        """Begin with nothing measured.

        Args:
            fixed: Most tiles in a batch, whatever is measured; 0: as measured.
            room: Says how many times larger the batch before could have been in memory.
        """
        self._fixed = fixed
        self._room = room
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()

    def size(self, lane: Hashable) -> int:
        """Say how many tiles a batch of a lane may hold."""
        return self._of(lane).size

    def cost(self, lane: Hashable) -> float:
        """Estimate how many seconds a tile of a lane takes."""
        known = self._lanes.get(lane)
        if known is None or known.tile_s is None:
            return self.mean_cost
        return known.tile_s

    def knows(self, lane: Hashable) -> bool:
        """Tell whether tiles of a lane were timed."""
        known = self._lanes.get(lane)
        return known is not None and known.tile_s is not None

    @property
    def mean_cost(self) -> float:
        """Estimate how many seconds a tile takes, of whatever lane."""
        known = [lane.tile_s for lane in self._lanes.values() if lane.tile_s is not None]
        return sum(known) / len(known) if known else UNKNOWN_S

    def observe(self, lane: Hashable, tiles: int, seconds: float) -> None:
        """Note the time that a batch took."""
        known = self._of(lane)
        tile_s = seconds / tiles
        past = tile_s if known.tile_s is None else known.tile_s
        known.tile_s = MEMORY * past + (1 - MEMORY) * tile_s
        known.counts[tiles] = known.counts.get(tiles, 0) + 1
        # The first of a size also chooses kernels and fills caches.
        if known.counts[tiles] > 1:
            known.best[tiles] = min(seconds, known.best.get(tiles, seconds))
        if not known.settled and known.counts.get(known.size, 0) > TIMINGS:
            self._judge(known)

    def shrink(self, lane: Hashable, most: int) -> None:
        """Remember that batches of a lane may hold no more than so many tiles: memory ran out."""
        known = self._of(lane)
        known.most = min(known.most, most)
        known.size = min(known.size, known.most)
        known.settled = True

    def timings(self, model: Hashable) -> tuple[BatchTiming, ...]:
        """List what was measured of a model; its lanes are pairs that begin with its name.

        Returns:
            By tile shape and number of tiles.
        """
        rows = []
        for lane, known in list(self._lanes.items()):
            if isinstance(lane, tuple) and lane[0] == model:
                rows += [
                    BatchTiming(lane[-1], tiles, seconds, tiles == known.size)
                    for tiles, seconds in sorted(known.best.copy().items())
                ]
        return tuple(rows)

    @property
    def largest(self) -> int:
        """Say how many tiles the largest batch may now hold."""
        return max((lane.size for lane in list(self._lanes.values())), default=self._fixed or 1)

    def _judge(self, known: _Lane) -> None:
        """Try twice as many, or settle for the smallest size that is about as fast as the best."""
        per_tile = {size: known.best[size] / size for size in known.best if size <= known.size}
        smaller = [seconds for size, seconds in per_tile.items() if size < known.size]
        gains = not smaller or per_tile[known.size] * GAIN < min(smaller)
        lasts = 2 * known.best[known.size] <= PATIENCE_S
        if gains and lasts and 2 * known.size <= known.most and self._room() >= 2:
            known.size *= 2
            return
        enough = GAIN * min(per_tile.values())
        known.size = min(size for size, seconds in per_tile.items() if seconds <= enough)
        known.settled = True

    def _of(self, lane: Hashable) -> _Lane:
        if lane not in self._lanes:
            most = self._fixed or MOST_TILES
            self._lanes[lane] = _Lane(self._fixed or 1, most, settled=bool(self._fixed))
            if len(self._lanes) > MOST_LANES:
                self._lanes.popitem(last=False)
        else:
            self._lanes.move_to_end(lane)
        return self._lanes[lane]
