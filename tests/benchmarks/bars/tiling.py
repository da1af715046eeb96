"""S9: whether time and memory stay in proportion as a volume grows."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.model.manifest import parse_manifest
from app.preprocessing.tiling import plan_tiles
from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.linux import forget_peak, resident_bytes
from tests.benchmarks.loads import send_one
from tests.benchmarks.scans import PHANTOM, large_scans
from tests.benchmarks.servers import OURS, Server, serving

SPACING_MM: Final = 2.0
"""The phantom model's own, so that a volume's voxels are those of the grid."""

SIZES: Final = (((84, 80, 82), 5), ((156, 150, 152), 5), ((300, 296, 290), 3))
"""Shapes of 8, 64 and 512 tiles, and how often each is measured."""

BYTES: Final = 8
"""Per voxel, which count as the volume itself: as it came and decoded (int16), and its grid."""

CONSTANT: Final = Limit(1.15, "cost")


@dataclass(frozen=True, slots=True)
class Size:
    """What a volume of some tiles takes: ms per tile; MB above the idle service and the volume."""

    tiles: int
    tile_ms: float
    above_mb: float
    rounds: int


def s9_tiling(run: Run) -> Iterator[Row]:
    """Time per tile against 8 tiles; memory above the volume against 64, the first full batches."""
    shapes = (((40, 44, 42), 1), ((84, 44, 42), 1), ((84, 80, 42), 1)) if run.fast else SIZES
    with serving(OURS, PHANTOM, TIMEOUT_S="300") as server:
        before = resident_bytes(server.process)
        _measure(server, *shapes[0], before)  # Warms up.
        sizes = [_measure(server, shape, rounds, before) for shape, rounds in shapes]
    first = sizes[0]
    note = "phantom model, plain int16"
    for size in sizes[1:]:
        what = f"time per tile, {size.tiles} tiles"
        rival = f"{first.tiles} tiles"
        yield Row(
            what, size.tile_ms, "ms", rival, first.tile_ms, CONSTANT, note, rounds=size.rounds
        )
    middle, last = sizes[1:]
    what = f"memory above the volume itself, {last.tiles} tiles"
    note = f"{BYTES} bytes per voxel are the volume itself; {first.tiles} tiles: "
    note += f"{first.above_mb:.0f} MB"
    rival = f"{middle.tiles} tiles"
    yield Row(what, last.above_mb, "MB", rival, middle.above_mb, CONSTANT, note)


def _measure(server: Server, shape: tuple[int, int, int], rounds: int, before: int) -> Size:
    (content,) = large_scans(1, shape, SPACING_MM)
    message = server.message("scan", content, query="?timeout_s=300")
    forget_peak(server.process)
    replies = [send_one(server.port, message) for _ in range(rounds)]
    peak = resident_bytes(server.process, peak=True)
    if {reply.status for reply in replies} != {200}:
        raise DisagreementError(f"expected status 200, got {replies[0].body[:200]!r}")
    text = (PHANTOM / "model.toml").read_text(encoding="utf-8")
    manifest = parse_manifest(PHANTOM.name, text)
    tiles = len(plan_tiles(shape, manifest.input, manifest.network.output_stride))
    above = peak - before - BYTES * int(np.prod(shape))
    spent = 1e3 * statistics.median(reply.seconds for reply in replies)
    return Size(tiles, spent / tiles, above / 1e6, rounds)
