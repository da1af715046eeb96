"""Resampling of a volume to another spacing, along its own axes.

Along each axis this is one matrix, which both smooths (only where the grid gets coarser) and
interpolates linearly. The matrix is banded, so it is applied in blocks of rows, each to the voxels
under its band: a quarter of the work of the whole matrix at 300 voxels, and work that grows with
the size of the scan alone.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from app.compute import Voxels
from app.geometry import Affine, scaling, translation

KERNEL_RADIUS_SIGMAS: Final = 4.0
"""A Gaussian is cut where its weight has fallen below exp(-8) of its peak."""

BLOCK_ROWS: Final = 16
"""Rows of a matrix applied at once: few enough to skip most of its zeros."""


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
        values = apply_along(
            values, axis, resampling_matrix(values.shape[axis], positions, step[axis])
        )
    return values.contiguous(), old_from_new


def resampled_size(size: int, step: float) -> int:
    """Count the voxels of an axis after resampling."""
    return max(1, round(size / step))


def resampling_matrix(
    size: int, positions: np.ndarray, shrink: float
) -> Float[np.ndarray, "new old"]:
    """Build the matrix that samples a line of voxels at positions.

    Linear interpolation of the line smoothed by a Gaussian of sigma 0.5 sqrt(shrink^2 - 1) voxels:
    a voxel of the coarse grid then has about the point spread of one of the fine grid, scaled.
    Positions past an end take the value of the end voxel.

    Args:
        size: Length of the line in voxels.
        positions: Where to sample, in voxels of the line.
        shrink: New spacing in old voxels.

    Returns:
        One row per position; rows sum to 1.
    """
    clamped = np.clip(positions, 0, size - 1)
    low = np.minimum(np.floor(clamped).astype(np.int64), max(size - 2, 0))
    high = np.minimum(low + 1, size - 1)
    fraction = (clamped - low)[:, None]
    sigma = 0.5 * math.sqrt(max(shrink**2 - 1, 0.0))
    below, above = gaussians(low, size, sigma), gaussians(high, size, sigma)
    return np.asarray((1 - fraction) * below + fraction * above)


def gaussians(centres: np.ndarray, size: int, sigma: float) -> Float[np.ndarray, "centre size"]:
    """Build the Gaussian around each of some voxels of a line; rows sum to 1, also at its ends.

    Args:
        centres: Voxel indices.
        size: Length of the line in voxels.
        sigma: In voxels; 0 leaves the voxel itself.
    """
    distance = np.arange(size) - centres[:, None]
    weights = np.exp(-0.5 * (distance / max(sigma, 1e-6)) ** 2)
    weights[np.abs(distance) > KERNEL_RADIUS_SIGMAS * sigma + 1] = 0.0
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def apply_along(
    values: Voxels, axis: int, matrix: Float[np.ndarray, "new old"]
) -> Float[Tensor, "new_i new_j new_k"]:
    """Multiply one axis of a volume by a banded matrix.

    Args:
        values: Voxel values, dense in memory, in any order of axes.
        axis: Which axis.
        matrix: Must not have a row of zeros.

    Returns:
        The new values, their axes in the same order in memory.
    """
    order = sorted(range(3), key=values.stride, reverse=True)
    rank = order.index(axis)
    shape = [values.shape[a] for a in order]
    old = values.permute(order).reshape(
        math.prod(shape[:rank]), shape[rank], math.prod(shape[rank + 1 :])
    )
    shape[rank] = len(matrix)
    new = old.new_empty(len(old), len(matrix), old.shape[2])
    for first in range(0, len(matrix), BLOCK_ROWS):
        rows = matrix[first : first + BLOCK_ROWS]
        used = np.flatnonzero(rows.any(axis=0))
        band = slice(int(used[0]), int(used[-1]) + 1)
        block = torch.from_numpy(rows[:, band]).to(old)
        if old.shape[2] == 1:
            new[:, first : first + len(rows), 0] = old[:, band, 0] @ block.T
        else:
            new[:, first : first + len(rows)] = block @ old[:, band]
    return new.reshape(shape).permute([order.index(a) for a in range(3)])
