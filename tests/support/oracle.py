"""The voting stages in NumPy float64, as an oracle for tests: written to be read, not to be fast.

It shares nothing with the package: no fixed point, no blocks, no margins, no coarse cells.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OracleVotes:
    """Votes, one row each; positions in voxels.

    Attributes:
        landmark: Which landmark, (votes,).
        source: Voxel that votes, (votes, 3).
        position: Where it points, (votes, 3).
        probability: (votes,).
    """

    landmark: NDArray[np.int64]
    source: Array
    position: Array
    probability: Array


def probabilities_of(scores: Array, activation: str, *, background: bool) -> Array:
    """Turn scores (channels i j k) into probabilities of the landmarks."""
    if activation == "softmax":
        exponential = np.exp(scores - scores.max(axis=0))
        scores = exponential / exponential.sum(axis=0)
    if activation == "sigmoid":
        with np.errstate(over="ignore"):  # Of one far below 0, whose probability is 0.
            scores = 1 / (1 + np.exp(-scores))
    return scores[1:] if background else scores


def collect(probabilities: Array, offsets: Array, threshold: float) -> OracleVotes:
    """Filter votes as P1 defines: voxel by voxel, landmark by landmark within a voxel.

    Args:
        probabilities: (landmarks i j k).
        offsets: (3 landmarks i j k), in voxels.
        threshold: Least probability.

    Returns:
        The votes with finite positions.
    """
    i, j, k, landmark = np.nonzero(np.moveaxis(probabilities, 0, -1) >= threshold)
    source = np.stack([i, j, k], axis=1).astype(np.float64)
    position = source + offsets[:, landmark, i, j, k].T
    finite = np.isfinite(position).all(axis=1)
    probability = probabilities[landmark, i, j, k]
    return OracleVotes(landmark[finite], source[finite], position[finite], probability[finite])


def rows(votes: OracleVotes, sample_shape: tuple[int, ...]) -> Array:
    """List P1's rows: landmark, probability, position."""
    kept = ((votes.position >= 0) & (votes.position < np.array(sample_shape))).all(axis=1)
    table = np.column_stack([votes.landmark, votes.probability, votes.position])
    return np.asarray(table[kept])


def heatmaps(
    landmark: NDArray[np.int64], position: Array, weight: Array, shape: tuple[int, ...]
) -> Array:
    """Sum the weights of the votes that point at each voxel; shape is (landmarks i j k)."""
    total = np.zeros(shape)
    voxel = np.floor(position + 0.5).astype(np.int64)
    inside = ((voxel >= 0) & (voxel < np.array(shape[1:]))).all(axis=1)
    i, j, k = voxel[inside].T
    np.add.at(total, (landmark[inside], i, j, k), weight[inside])
    return total


def smooth(volume: Array, sigmas: tuple[float, ...], sigmas_wide: float = 3.0) -> Array:
    """Smooth a volume by a dense 3D Gaussian, cut ``sigmas_wide`` away, with zeros around it."""
    lines = []
    for sigma in sigmas:
        reach = int(np.ceil(sigmas_wide * sigma))
        line = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
        lines.append(line / line.sum())
    kernel = lines[0][:, None, None] * lines[1][None, :, None] * lines[2][None, None, :]
    spread = np.zeros(np.array(volume.shape) + np.array(kernel.shape) - 1)
    for voxel in np.argwhere(volume != 0):
        region = tuple(
            slice(start, start + size) for start, size in zip(voxel, kernel.shape, strict=True)
        )
        spread[region] += volume[tuple(voxel)] * kernel
    middle = tuple(
        slice(size // 2, size // 2 + edge)
        for size, edge in zip(kernel.shape, volume.shape, strict=True)
    )
    return np.asarray(spread[middle])


def mean_shift(
    position: Array, weight: Array, start: Array, reach_mm: float, spacing_mm: Array
) -> Array:
    """Climb from a start to the weighted mean of the votes within reach, until it stands still."""
    centre = start * spacing_mm
    for _ in range(100):
        near = np.linalg.norm(position * spacing_mm - centre, axis=1) <= reach_mm
        centre = np.average(position[near] * spacing_mm, axis=0, weights=weight[near])
    return np.asarray(centre / spacing_mm)


def voters(
    point: Array,
    shape: tuple[int, ...],
    spacing_mm: Array,
    radius_mm: float,
    stride: int,
    holds: Callable[[Array], NDArray[np.bool_]] | None = None,
) -> int:
    """Count the field voxels within a radius of a point whose centres lie in the grid.

    With ``holds``, which tells it of points in grid voxels, they lie in the scan as well.
    """
    counts = [-(-size // stride) for size in shape]
    centres = np.stack(
        np.meshgrid(*[(np.arange(n) + 0.5) * stride - 0.5 for n in counts], indexing="ij"), axis=-1
    )
    inside = (centres <= np.array(shape) - 0.5).all(axis=-1)
    inside &= True if holds is None else holds(centres)
    near = np.linalg.norm((centres - point) * spacing_mm, axis=-1) <= radius_mm
    return int((near & inside).sum())


def shift_and_sum(x: Array, mask: Array, step: int) -> Array:
    """P3 element by element of channels and columns: out[b, 0, h, w + i * step] += x * mask."""
    batch, channels, height, width = x.shape
    total = np.zeros((batch, 1, height, width + (channels - 1) * step))
    for i in range(channels):
        for w in range(width):
            total[:, 0, :, w + i * step] += x[:, i, :, w] * mask[:, w]
    return total
