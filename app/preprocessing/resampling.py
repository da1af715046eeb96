"""Resampling of a scan to another spacing, along its own axes.

Along each axis this is one matrix, which both smooths (only where the grid gets coarser) and
interpolates linearly. Its rows are short, so only what is not zero of them is kept, and the work
grows with the size of the scan alone. On the CPU a compiled loop filters along two axes at once,
while the planes that it reads are in the cache; elsewhere, and along the third axis, rows are
applied in blocks, each to the voxels under it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

from app.compute import Voxels, upload, upload_numbers
from app.geometry import Affine, scaling, translation
from app.preprocessing.cpu.resampling import resample_planes
from app.preprocessing.cpu.slabs import memory_order

KERNEL_RADIUS_SIGMAS: Final = 4.0
"""A Gaussian is cut where its weight has fallen below exp(-8) of its peak."""

BLOCK_ROWS: Final = 16
"""Rows of a matrix applied at once on a CPU: few enough to skip most of its zeros."""

CUDA_BLOCK_ROWS: Final = 256
"""The same on CUDA, where zeros cost less than launches; but not all those of a long line."""


@dataclass(frozen=True, slots=True)
class Taps:
    """A matrix whose rows are zero but for a few neighbouring columns.

    Attributes:
        first: Column of each row's first weight; it may lie outside where the weight is 0.
        weights: Of each row.
    """

    first: Int64[np.ndarray, " rows"]
    weights: Float64[np.ndarray, "rows taps"]

    def __len__(self) -> int:
        return len(self.first)

    def block(self, start: int, stop: int) -> tuple[int, Float64[np.ndarray, "block columns"]]:
        """Return some rows: their first column that counts, and their columns from there on."""
        row, tap = np.nonzero(self.weights[start:stop])
        column = self.first[start:stop][row] + tap
        low = int(column.min())
        dense = np.zeros((stop - start, int(column.max()) + 1 - low))
        dense[row, column - low] = self.weights[start:stop][row, tap]
        return low, dense


def resample(
    voxels: Shaped[np.ndarray, "i j k"],
    step: Sequence[float] | np.ndarray,
    device: torch.device,
) -> tuple[Float[Tensor, "new_i new_j new_k"], Affine]:
    """Bring a scan to a device in another spacing, smoothed first where the grid gets coarser.

    Args:
        voxels: Of any type that torch takes; any strides.
        step: New spacing in old voxels, per axis; above 1 shrinks.
        device: The target.

    Returns:
        The new values, float32, contiguous, in memory of their own; and the affine from new indices
        to old ones. Centres coincide.
    """
    old = voxels.shape
    shape = [resampled_size(n, s) for n, s in zip(old, step, strict=True)]
    old_centre = [(n - 1) / 2 for n in old]
    new_centre = [(n - 1) / 2 for n in shape]
    old_from_new = (
        translation(old_centre) @ scaling(list(step)) @ translation([-m for m in new_centre])
    )
    matrices = [
        None
        if shape[axis] == old[axis] and step[axis] == 1.0
        else resampling_taps(
            old[axis], step[axis] * np.arange(shape[axis]) + old_from_new[axis, 3], step[axis]
        )
        for axis in range(3)
    ]
    if device.type == "cpu" and any(matrices):
        return _resample_on_cpu(voxels, matrices).contiguous(), old_from_new
    # A scan that shrinks keeps its memory order, as reordering the grid is far cheaper. Otherwise
    # one pass does both, and nothing is held twice.
    values = upload(voxels, device, "K" if np.prod(step) > 1 else "C")
    for axis in sorted(range(3), key=lambda axis: shape[axis] / old[axis]):  # Shrinks first.
        if (matrix := matrices[axis]) is not None:
            values = apply_along(values, axis, matrix)
    return values.contiguous(), old_from_new


def resampled_size(size: int, step: float) -> int:
    """Count the voxels of an axis after resampling."""
    return max(1, round(size / step))


def resampling_taps(size: int, positions: Float64[np.ndarray, " new"], shrink: float) -> Taps:
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
    fraction = (clamped - low)[:, None]
    sigma = smoothing_sigma(shrink)
    below = gaussian_taps(low, size, sigma)
    above = gaussian_taps(np.minimum(low + 1, size - 1), size, sigma)
    weights = np.zeros((len(low), below.weights.shape[1] + 1))
    weights[:, :-1] = (1 - fraction) * below.weights
    weights[:, 1:] += fraction * above.weights
    return Taps(below.first, weights)


def gaussian_taps(centres: Int64[np.ndarray, " rows"], size: int, sigma: float) -> Taps:
    """Build the Gaussian around each of some voxels of a line; rows sum to 1, also at its ends.

    Args:
        centres: Voxel indices.
        size: Length of the line in voxels.
        sigma: In voxels; 0 leaves the voxel itself.
    """
    kernel = gaussian(sigma)
    first = centres - len(kernel) // 2
    column = first[:, None] + np.arange(len(kernel))
    weights = kernel * ((column >= 0) & (column < size))
    return Taps(first, weights / weights.sum(axis=1, keepdims=True))


def gaussian(sigma: float) -> Float64[np.ndarray, " taps"]:
    """Build a Gaussian of height 1, in voxels; a sigma of 0 leaves the voxel itself."""
    radius = int(KERNEL_RADIUS_SIGMAS * sigma + 1) if sigma > 0 else 0
    return np.exp(-0.5 * (np.arange(-radius, radius + 1) / max(sigma, 1e-6)) ** 2)


def smoothing_sigma(shrink: float) -> float:
    """Return the sigma that makes voxels of one spacing as blurred as those of another, larger."""
    return 0.5 * math.sqrt(max(shrink**2 - 1, 0.0))


def apply_along(values: Voxels, axis: int, matrix: Taps) -> Float[Tensor, "new_i new_j new_k"]:
    """Multiply one axis of a volume by a matrix.

    Args:
        values: Voxel values, dense in memory, in any order of axes.
        axis: Which axis.
        matrix: For lines along it.

    Returns:
        The new values, their axes in the same order in memory.
    """
    order = sorted(range(3), key=values.stride, reverse=True)
    rank = order.index(axis)
    shape = [values.shape[a] for a in order]
    old = values.permute(order).reshape(
        math.prod(shape[:rank]), shape[rank], math.prod(shape[rank + 1 :])
    )
    count = shape[rank] = len(matrix)
    new = old.new_empty(len(old), count, old.shape[2])
    most = CUDA_BLOCK_ROWS if old.device.type == "cuda" else BLOCK_ROWS
    for start in range(0, count, most):
        rows = slice(start, min(start + most, count))
        first, weights = matrix.block(rows.start, rows.stop)
        band = slice(first, first + weights.shape[1])
        block = upload_numbers(weights.astype(np.float32), old.device)
        if old.shape[2] == 1:
            new[:, rows, 0] = old[:, band, 0] @ block.T
        else:
            new[:, rows] = block @ old[:, band]
    return new.reshape(shape).permute([order.index(a) for a in range(3)])


def _resample_on_cpu(
    voxels: Shaped[np.ndarray, "i j k"], matrices: Sequence[Taps | None]
) -> Float[Tensor, "new_i new_j new_k"]:
    """Multiply each axis of a scan by its matrix; None leaves it as it is."""
    order = memory_order(voxels)
    # Read forwards: to convert a line backwards takes several times as long.
    backwards = tuple(axis for axis in range(3) if voxels.strides[axis] < 0)
    dense = np.flip(voxels, backwards).transpose(order)
    slow, middle, fast = (
        _matrix_for(size, matrices[axis], axis in backwards)
        for axis, size in zip(order, dense.shape, strict=True)
    )
    shrinks = len(fast) < dense.shape[2]
    if is_first := shrinks and len(slow) * len(middle) > math.prod(dense.shape[:2]):
        # Else lines of many voxels that become few would be multiplied before they do.
        dense = apply_along(torch.from_numpy(dense.astype(np.float32)), 2, fast).numpy()
    planes = resample_planes(dense, (slow.first, slow.weights), (middle.first, middle.weights))
    values = torch.from_numpy(planes)
    if not is_first and (matrices[order[2]] is not None or order[2] in backwards):
        values = apply_along(values, 2, fast)
    return values.permute([order.index(axis) for axis in range(3)])


def _matrix_for(size: int, matrix: Taps | None, backwards: bool) -> Taps:
    """Return the matrix for lines of so many voxels that may be read backwards."""
    first, weights = np.arange(size), np.ones((size, 1))
    if matrix is not None:
        first, weights = matrix.first, matrix.weights
    return (
        Taps(size - first - weights.shape[1], weights[:, ::-1])
        if backwards
        else Taps(first, weights)
    )
