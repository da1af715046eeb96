"""V9: how near the read-out of heatmaps comes, on Gaussians whose centre is known."""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Float64

from tests.benchmarks import ours
from tests.benchmarks.harness import Limit, Row, Run
from tests.support.synthetic import gaussian_field

Points = Float64[np.ndarray, "landmarks 3"]

THRESHOLD: Final = 0.2
SIGMAS: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NOISE: Final = 0.05
"""Of the peak, in every voxel by itself."""

KINDS: Final = (
    ("clean", 0.0, False, 1, 0.002),
    ("noise of 5 %", NOISE, False, 1, 0.08),
    ("cut by a border", 0.0, True, 1, 0.002),
    ("cut by a border, noise of 5 %", NOISE, True, 1, 0.08),
    ("clean, stride 2", 0.0, False, 2, 0.002),
    ("noise of 5 %, stride 2", NOISE, False, 2, 0.15),
)
"""Name, noise, whether landmarks lie at a border, output stride, and most mean error in voxels."""


def v9_heatmap_readout(run: Run) -> Iterator[Row]:
    """Mean error over many landmarks, against what is mostly done with heatmaps."""
    for kind, noise, cut, stride, limit in KINDS:
        for sigma in SIGMAS:
            if sigma < stride:
                continue  # Such a heatmap is narrower than its own voxels.
            yield from _compare(f"{kind}, sigma {sigma:g}", (sigma, noise, cut, stride), limit, run)


def _compare(
    kind: str, case: tuple[float, float, bool, int], limit: float, run: Run
) -> Iterator[Row]:
    sigma, noise, cut, stride = case
    count = 8 if run.fast else 48
    random = np.random.default_rng(9)
    edge = stride * math.ceil((7 * sigma + 8) / stride)
    shape = (edge, edge + 2 * stride, edge + 4 * stride)
    truth = np.array(shape) / 2 - 0.5 + random.uniform(-stride, stride, (count, 3))
    if cut:  # From the outermost voxel's face on, along one axis.
        truth[:, 0] = random.uniform(-0.5, 1.5 * sigma, count)
    field = gaussian_field(truth, shape, sigma, noise=noise, stride=stride, seed=1)
    radius = sigma * math.sqrt(-2 * math.log(THRESHOLD))
    reading = ours.make_heatmap_reading(shape, count, radius, THRESHOLD, stride)
    mine = ours.places(ours.find(field, THRESHOLD, reading))
    heatmaps = field.scores.double().numpy()
    what = f"mean error, {kind}, {count} landmarks"
    rivals = {
        "highest voxel": _highest(heatmaps),
        "log-parabola": _log_parabola(heatmaps),
        "centre of mass over the threshold": _centre_of_mass(heatmaps),
    }
    for index, (name, guess) in enumerate(rivals.items()):
        theirs = (guess + 0.5) * stride - 0.5
        error, their_error = (
            float(np.linalg.norm(found - truth, axis=1).mean()) for found in (mine, theirs)
        )
        bar = Limit(limit, "figure") if index == 0 else None
        yield Row(what, error, "voxel", name, their_error, bar)


def _highest(heatmaps: Float64[np.ndarray, "landmarks i j k"]) -> Points:
    """Find the highest voxel of each heatmap."""
    flat = heatmaps.reshape(len(heatmaps), -1).argmax(axis=1)
    return np.stack(np.unravel_index(flat, heatmaps.shape[1:]), axis=1).astype(np.float64)


def _log_parabola(heatmaps: Float64[np.ndarray, "landmarks i j k"]) -> Points:
    """Move from the highest voxel to the top of a parabola through three logarithms, by axis."""
    best = _highest(heatmaps)
    for place, heatmap in zip(best, heatmaps, strict=True):
        voxel = place.astype(int)
        for axis, step in enumerate(np.eye(3, dtype=int)):
            if 0 < voxel[axis] < heatmap.shape[axis] - 1:
                three = (heatmap[tuple(voxel + side * step)] for side in (-1, 0, 1))
                low, top, high = (math.log(max(value, 1e-6)) for value in three)
                place[axis] += 0.5 * (low - high) / min(low - 2 * top + high, -1e-9)
    return best


def _centre_of_mass(heatmaps: Float64[np.ndarray, "landmarks i j k"]) -> Points:
    """Average the voxels over the threshold by their values."""
    weights = np.where(heatmaps >= THRESHOLD, heatmaps, 0.0)
    axes = np.stack(np.meshgrid(*map(np.arange, heatmaps.shape[1:]), indexing="ij"))
    sums = np.einsum("cijk,aijk->ca", weights, axes.astype(np.float64))
    return np.asarray(sums / weights.sum(axis=(1, 2, 3))[:, None])
