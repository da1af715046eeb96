"""R1: a scan has the same landmarks in any batch, beside any neighbours, after any start."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import read_volume
from app.voting import positions_of
from tests.benchmarks.bars.throughput import Work, serve_all
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.rivals.tile_batches import find_together
from tests.benchmarks.scans import PHANTOM, SKULL, skulls, small_scans
from tests.benchmarks.servers import OURS, places_of, serving

BATCHES_MM: Final = Limit(1e-4, "figure")
STARTS_MM: Final = Limit(1e-3, "figure")

SIZES: Final = range(2, 9)
STARTS: Final[tuple[dict[str, str], ...]] = (
    {},
    {"BATCH_SIZE": "1"},
    {"BATCH_SIZE": "8"},
    {"THREADS": "1"},
    {"DEVICE": "cpu:0,cpu:1"},
)
"""Settings of services that must answer alike; the sizes of the first one's batches are timed."""

Places = Sequence[Float64[np.ndarray, "landmarks 3"]]


def r1_repeats(run: Run) -> Iterator[Row]:
    """Compare every scan alone with itself in batches, in one process and in several services."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if run.fast:
        work = Work(small_scans(3), "generated scans", PHANTOM, 3, device)
    else:
        work = Work(*skulls(16), SKULL, 8, device)
    detector = Detector(load_checked(work.model, torch.device(device), "auto"))
    alone = _found(detector, work.contents, 1)
    sizes = SIZES[:2] if run.fast else SIZES
    apart = []
    for size in sizes:
        order = np.random.default_rng(size).permutation(len(work.contents))
        found = _found(detector, [work.contents[scan] for scan in order], size)
        apart.append(farthest(found, [alone[scan] for scan in order]))
    what = f"farthest that a landmark moves: {len(alone)} scans of {work.model.name}"
    precision = detector.model.network.precision
    note = f"neighbours at random, {work.note}, {precision}"
    text = f"{what}, batches of {sizes[0]} to {sizes[-1]}"
    yield Row(text, max(apart), "mm", limit=BATCHES_MM, note=note)
    for settings in STARTS[:: 4 if run.fast else 1]:
        chosen = {"DEVICE": device} | settings
        with serving(OURS, work.model, **chosen) as server:
            _, answers = serve_all(server, work)
        found = [np.stack(list(places_of(answer).values())) for answer in answers]
        words = ", ".join(f"{name}={value}" for name, value in chosen.items())
        text = f"{what}, a service with {words}"
        yield Row(text, farthest(found, alone), "mm", limit=STARTS_MM, note=work.note)


def farthest(found: Places, expected: Places) -> float:
    """Measure how far landmarks lie apart at most, in mm; infinity if one is in one only."""
    apart = 0.0
    for mine, yours in zip(found, expected, strict=True):
        if not np.array_equal(np.isnan(mine), np.isnan(yours)):
            return float("inf")
        apart = max(apart, float(np.linalg.norm(np.nan_to_num(mine - yours), axis=1).max()))
    return apart


def _found(detector: Detector, contents: Sequence[bytes], tiles: int) -> Places:
    volumes = [read_volume(content) for content in contents]
    return [positions_of(found) for found in find_together(detector, volumes, tiles)]
