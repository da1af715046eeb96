"""Resampling of a volume by splines, as nnU-Net does: the spacing that its networks know.

Scans are not smoothed, and their ends stay where they are, so the new voxels are a little wider or
narrower than was asked for. Where voxels are much thicker along one axis than along the others,
only the others are interpolated; along that axis the nearest slice is taken. SciPy says how much
each old voxel counts for a new one; the scan is multiplied by that along each axis, on its device.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from app.compute import Voxels
from app.errors import ModelRefused
from app.geometry import Affine, scaling, translation
from app.preprocessing.resampling import Taps, apply_along, resampled_size

THICK: Final = 3.0
"""An axis whose voxels are more than so many times as long as along another."""

NEGLIGIBLE: Final = 1e-8
"""Weights of voxels far from a new one; without them a matrix has a band."""


def resample_as_nnunet(
    values: Voxels, spacing: Sequence[float] | np.ndarray, target: Sequence[float]
) -> tuple[Float[Tensor, "new_i new_j new_k"], Affine]:
    """Resample to about a spacing along every axis.

    Args:
        values: Voxel values, dense in memory, in any order of axes.
        spacing: Of the scan, in mm.
        target: Of the grid, in mm.

    Returns:
        The new values, contiguous, none beyond those of the scan; and the affine from new indices
        to old ones. Outer faces coincide.

    Raises:
        ModelRefused: SciPy is not installed.
    """
    old = values.shape
    new = [resampled_size(*pair) for pair in zip(old, np.asarray(target) / spacing, strict=True)]
    thick = find_thick_axis(spacing, target)
    along = [axis for axis in range(3) if axis != thick]
    low, high = values.amin(along, keepdim=True), values.amax(along, keepdim=True)
    for axis in sorted(along, key=lambda axis: new[axis] / old[axis]):  # Shrinks first.
        if new[axis] != old[axis]:
            values = _apply(values, axis, spline_matrix(old[axis], new[axis], order=3))
    if list(old) != new:
        values.clamp_(low, high)
    if thick is not None and new[thick] != old[thick]:
        values = _apply(values, thick, spline_matrix(old[thick], new[thick], order=0))
    steps = np.divide(old, new)
    return values.contiguous(), translation(list(steps / 2 - 0.5)) @ scaling(list(steps))


def _apply(values: Voxels, axis: int, matrix: np.ndarray) -> Float[Tensor, "new_i new_j new_k"]:
    return apply_along(values, axis, Taps(np.zeros(len(matrix), np.int64), matrix))


def find_thick_axis(*spacings: Sequence[float] | np.ndarray) -> int | None:
    """Find the axis along which voxels of the first spacing that has one are thick."""
    for spacing in map(np.asarray, spacings):
        if spacing.max() > THICK * spacing.min():
            longest = np.flatnonzero(spacing == spacing.max())
            return int(longest[0]) if len(longest) == 1 else None
    return None


def spline_matrix(old: int, new: int, order: int) -> Float[np.ndarray, "new old"]:
    """Build the matrix that interpolates a line of voxels between its outer faces.

    Args:
        old: Length of the line in voxels.
        new: How many to make of it.
        order: Of the spline; 0 takes the nearest voxel.
    """
    # An extra, which the networks of nnU-Net take in any case.
    try:
        from scipy.ndimage import zoom
    except ImportError as error:
        raise ModelRefused(
            "input.tile_layout 'nnunet': expected SciPy; pip install 'landmarkd[nnunet]'"
        ) from error
    matrix = zoom(np.eye(old), (new / old, 1), order=order, mode="nearest", grid_mode=True)
    return np.where(np.abs(matrix) < NEGLIGIBLE, 0.0, matrix)
