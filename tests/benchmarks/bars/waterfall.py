"""The waterfall: what each optimisation gains by itself, from plain torch to ours.

A step is a whole way from Field to places. To show one more, write it as a function and put it into
``STEPS`` between its neighbours.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from tests.benchmarks import agreement, ours
from tests.benchmarks.fields import Scene, make_scene
from tests.benchmarks.harness import DisagreementError, Row, Run, median_times
from tests.benchmarks.rivals import plain_torch

Places = Float64[np.ndarray, "landmarks 3"]
Step = Callable[[Scene], Places]

TOLERANCE: Final = 2.0
"""Voxels; a step may still read the highest voxel only."""


def as_plain_torch(scene: Scene) -> Places:
    """Find the highest voxel of dense heatmaps."""
    return plain_torch.find(scene.field, scene.threshold).peaks.double().numpy()


def only_candidates(scene: Scene) -> Places:
    """Compare scores with a limit before any exponential; read the offsets of survivors alone."""
    votes = ours.filter_votes_by_torch(scene.field, scene.threshold)
    reading = ours.make_reading(scene.shape, scene.landmarks, scene.radius)
    heatmaps = ours.add_up(votes, range(scene.landmarks), reading)
    highest = heatmaps.flatten(1).argmax(1)
    return np.stack(np.unravel_index(highest.numpy(), scene.shape), axis=1).astype(np.float64)


def nothing_dense(scene: Scene) -> Places:
    """Find peaks in the cells that votes hit, and modes on the votes: no heatmap at all."""
    votes = ours.filter_votes_by_torch(scene.field, scene.threshold)
    reading = ours.make_reading(scene.shape, scene.landmarks, scene.radius)
    return ours.places(ours.find_from_votes(votes, reading))


def compiled(scene: Scene) -> Places:
    """Filter by compiled loops, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return as_ours(scene)
    finally:
        torch.set_num_threads(threads)


def as_ours(scene: Scene) -> Places:
    """Find landmarks as the service does."""
    reading = ours.make_reading(scene.shape, scene.landmarks, scene.radius)
    return ours.places(ours.find(scene.field, scene.threshold, reading))


STEPS: Final[tuple[tuple[str, Step], ...]] = (
    ("plain torch", as_plain_torch),
    ("only candidates", only_candidates),
    ("nothing dense", nothing_dense),
    ("compiled filter, one thread", compiled),
    ("ours: all threads", as_ours),
)


def waterfall(run: Run) -> Iterator[Row]:
    """Time every step, and show its gain over the one before."""
    shapes = [(40, 36, 44)] if run.fast else [(300, 300, 300), (70, 70, 70)]
    for shape in shapes:
        scene = make_scene(shape, 3)
        for name, step in STEPS:
            try:
                agreement.near(step(scene), scene.centres, TOLERANCE)
            except DisagreementError as error:
                raise DisagreementError(f"step {name}: {error}") from error
        sides = [partial(step, scene) for _, step in STEPS]
        times, rounds = median_times(sides, run.rounds, run.case_s)
        before: tuple[str, float | None] = ("", None)
        for (name, _), spent in zip(STEPS, times, strict=True):
            what = f"{'x'.join(map(str, shape))}: {name}"
            yield Row(what, spent, "ms", *before, rounds=rounds)
            before = (name, spent)
