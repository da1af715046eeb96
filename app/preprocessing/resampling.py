"""Resampling of a volume to another spacing, along its own axes.

Along each axis this is one matrix, which both smooths (only where the grid gets coarser) and
interpolates linearly. The matrix is banded, so it is applied in blocks of rows, each to the voxels
under its band: a quarter of the work of the whole matrix at 300 voxels, and work that grows with
the size of the scan alone.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from app.compute import Voxels
from app.geometry import Affine, scaling, translation

KERNEL_RADIUS_SIGMAS: Final = 4.0
"""A Gaussian is cut where its weight has fallen below exp(-8) of its peak."""

BLOCK_ROWS: Final = 16
"""Rows of a matrix applied at once: few enough to skip most of its zeros."""

Band = tuple[int, Float64[np.ndarray, "rows columns"]]
"""Rows of a banded matrix: their first column that is not zero, and their columns from there on."""


def resample(
    values: Voxels, step: Sequence[float] | np.ndarray
) -> tuple[Float[Tensor, "new_i new_j new_k"], Affine]:
    """Resample along every axis, smoothing first where the grid gets coarser.

    Args:
        values: Voxel values, dense in memory, in any order of axes.
        step: New spacing in old voxels, per axis; above 1 shrinks.

    Returns:
        The new values, contiguous, and the affine from new indices to old ones. Centres coincide.
    """
    shape = [resampled_size(n, s) for n, s in zip(values.shape, step, strict=True)]
    old_centre = [(n - 1) / 2 for n in values.shape]
    new_centre = [(n - 1) / 2 for n in shape]
    old_from_new = (
        translation(old_centre) @ scaling(list(step)) @ translation([-m for m in new_centre])
    )
    for axis in range(3):
        positions = step[axis] * np.arange(shape[axis]) + old_from_new[axis, 3]
        if shape[axis] == values.shape[axis] and step[axis] == 1.0:
            continue
        rows = partial(resampling_rows, values.shape[axis], positions, step[axis])
        values = apply_along(values, axis, shape[axis], rows)
    return values.contiguous(), old_from_new


def resampled_size(size: int, step: float) -> int:
    """Count the voxels of an axis after resampling."""
    return max(1, round(size / step))


def resampling_rows(size: int, positions: np.ndarray, shrink: float, block: slice) -> Band:
    """Build rows of the matrix that samples a line of voxels at positions.

    Linear interpolation of the line smoothed by a Gaussian of sigma 0.5 sqrt(shrink^2 - 1) voxels:
    a voxel of the coarse grid then has about the point spread of one of the fine grid, scaled.
    Positions past an end take the value of the end voxel.

    Args:
        size: Length of the line in voxels.
        positions: Where to sample, in voxels of the line.
        shrink: New spacing in old voxels.
        block: Of which positions.

    Returns:
        One row per position; rows sum to 1.
    """
    clamped = np.clip(positions[block], 0, size - 1)
    low = np.minimum(np.floor(clamped).astype(np.int64), max(size - 2, 0))
    high = np.minimum(low + 1, size - 1)
    fraction = (clamped - low)[:, None]
    sigma = 0.5 * math.sqrt(max(shrink**2 - 1, 0.0))
    first, weights = gaussians(np.concatenate([low, high]), size, sigma)
    return first, (1 - fraction) * weights[: len(low)] + fraction * weights[len(low) :]


def gaussians(centres: np.ndarray, size: int, sigma: float) -> Band:
    """Build the Gaussian around each of some voxels of a line; rows sum to 1, also at its ends.

    Args:
        centres: Voxel indices.
        size: Length of the line in voxels.
        sigma: In voxels; 0 leaves the voxel itself.
    """
    reach = KERNEL_RADIUS_SIGMAS * sigma + 1
    first = max(int(centres.min() - reach), 0)
    distance = np.arange(first, min(int(centres.max() + reach) + 1, size)) - centres[:, None]
    weights = np.exp(-0.5 * (distance / max(sigma, 1e-6)) ** 2)
    weights[np.abs(distance) > reach] = 0.0
    return first, weights / weights.sum(axis=1, keepdims=True)


def band_of(matrix: Float[np.ndarray, "new old"], block: slice) -> Band:
    """Leave out the columns that are zero in all rows of a block."""
    used = np.flatnonzero(matrix[block].any(axis=0))
    return int(used[0]), matrix[block, used[0] : used[-1] + 1]


def apply_along(
    values: Voxels, axis: int, count: int, rows: Callable[[slice], Band]
) -> Float[Tensor, "new_i new_j new_k"]:
    """Multiply one axis of a volume by a banded matrix.

    Args:
        values: Voxel values, dense in memory, in any order of axes.
        axis: Which axis.
        count: Rows of the matrix.
        rows: Makes a block of them. The whole matrix could take far more memory than the scan.

    Returns:
        The new values, their axes in the same order in memory.
    """
    order = sorted(range(3), key=values.stride, reverse=True)
    rank = order.index(axis)
    shape = [values.shape[a] for a in order]
    old = values.permute(order).reshape(
        math.prod(shape[:rank]), shape[rank], math.prod(shape[rank + 1 :])
    )
    shape[rank] = count
    new = old.new_empty(len(old), count, old.shape[2])
    for start in range(0, count, BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, count))
        first, weights = rows(block)
        band = slice(first, first + weights.shape[1])
        matrix = torch.from_numpy(weights).to(old)
        if old.shape[2] == 1:
            new[:, block, 0] = old[:, band, 0] @ matrix.T
        else:
            new[:, block] = matrix @ old[:, band]
    return new.reshape(shape).permute([order.index(a) for a in range(3)])
