"""V8: how near the read-out comes, on votes whose truth is known."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from tests.benchmarks import ours
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.rivals import numpy_add_at
from tests.support.synthetic import votes_at

Points = Float64[np.ndarray, "votes 3"]

SHAPE: Final = (48, 48, 48)
RADIUS: Final = 10.0
SECOND: Final = 0.3
"""Share of the votes that a second mode has."""

KINDS: Final = (
    (0.0, 0.0, "clean", 0.03),
    (0.2, 0.0, "20 % outliers", 0.04),
    (0.0, 14.0, "30 % on a second mode 14 voxels away", 0.40),
    (0.0, 7.0, "30 % on a second mode 7 voxels away", 0.40),
)
"""Share of outliers, distance of the second mode in voxels, name, and most error. At 14 voxels the
mean of all votes errs by 4.2; at 7 the modes overlap in what is read out around the first (6)."""


def v8_accuracy(run: Run) -> Iterator[Row]:
    """Mean error over many trials, against the heatmap's highest voxel."""
    trials = 5 if run.fast else 200
    reading = ours.make_reading(SHAPE, 1, RADIUS)
    for outliers, apart, kind, limit in KINDS:
        random = np.random.default_rng(8)
        errors = []
        for _ in range(trials):
            truth = random.uniform(RADIUS + 2, np.array(SHAPE) - RADIUS - 3)
            votes = _votes(truth, outliers, apart, random)
            place = ours.places(ours.find_from_votes(votes, reading))[0]
            guesses = (place, _highest(votes), votes.position.double().mean(0).numpy())
            errors.append([float(np.linalg.norm(guess - truth)) for guess in guesses])
        mine, highest, mean = np.mean(errors, axis=0).tolist()
        what = f"mean error, {kind}, {trials} trials"
        yield Row(what, mine, "voxel", "highest voxel", highest, Limit(limit, "figure"))
        yield Row(what, mine, "voxel", "mean of all votes", mean)


def _votes(
    truth: Float64[np.ndarray, " 3"], outliers: float, apart: float, random: np.random.Generator
) -> ours.Votes:
    """Let the voxels around a place vote for it, or for something else."""
    voxels = np.stack(np.meshgrid(*[np.arange(n) for n in SHAPE], indexing="ij"), axis=-1)
    source = voxels.reshape(-1, 3)
    source = source[np.linalg.norm(source - truth, axis=1) <= RADIUS]
    position = truth + random.standard_normal(source.shape)
    wild = random.random(len(source)) < outliers
    position[wild] = random.uniform(0, SHAPE, (int(wild.sum()), 3))
    if apart:
        way = random.standard_normal(3)
        position[random.random(len(source)) < SECOND] += apart * way / np.linalg.norm(way)
    return votes_at(position, probability=0.8, source=source)


def _highest(votes: ours.Votes) -> Float64[np.ndarray, " 3"]:
    """Find the voxel that most votes round to."""
    columns = (torch.zeros(len(votes), 1), votes.weight[:, None], votes.position)
    heatmap = numpy_add_at.add_up(torch.cat(columns, dim=1).numpy(), 1, SHAPE)[0]
    return np.array(np.unravel_index(heatmap.argmax(), SHAPE), dtype=np.float64)
