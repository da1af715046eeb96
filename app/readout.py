"""Grid + Manifest -> Readout: where votes are counted, who could have voted, and where that is."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from app.frames import Affine
from app.grid import Grid
from app.manifest import Manifest

REACH: Final = 0.6
"""Votes are read out within this share of the radius in which voxels vote (measured optimum)."""


@dataclass(frozen=True, slots=True)
class Readout:
    """Where and how votes are counted.

    Attributes:
        landmarks: How many landmarks there are.
        shape: Shape of the grid in voxels.
        spacing_mm: Spacing of the grid along its axes.
        radius_mm: The network votes from voxels within this distance of a landmark.
        smooth_mm: Sigma of the Gaussian that smooths heatmaps.
        stride: Grid voxels per field voxel.
    """

    landmarks: int
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    radius_mm: float
    smooth_mm: float
    stride: int = 1

    @property
    def reach_mm(self) -> float:
        """Distance from a mode within which votes count for it."""
        return REACH * self.radius_mm


@dataclass(frozen=True, slots=True)
class GridFrame:
    """Where a grid lies.

    Attributes:
        to_volume: Grid voxel index -> index of the uploaded array.
        to_world: Grid voxel index -> mm, RAS.
    """

    to_volume: Affine
    to_world: Affine


def readout_of(grid: Grid, manifest: Manifest) -> Readout:
    """Say how the votes of a model are counted on a grid."""
    i, j, k = grid.voxels.shape
    return Readout(
        landmarks=len(manifest.landmarks),
        shape=(i, j, k),
        spacing_mm=grid.spacing_mm,
        radius_mm=manifest.voting.radius_mm,
        smooth_mm=manifest.voting.smooth_mm,
        stride=manifest.network.output_stride,
    )


def voters_around(
    points: Float64[np.ndarray, "*n 3"], readout: Readout
) -> Float64[np.ndarray, "*n"]:
    """Count the field voxels that could have voted for a place.

    These are the field voxels with a centre within the voting radius of the place and inside the
    grid. Around a place outside the grid at least an eighth of a whole ball is counted: no place
    inside a grid larger than the radius sees less, and a handful of voxels proves nothing.

    Args:
        points: Places in grid voxels; NaN counts 1.
        readout: The grid, its field's stride and the voting radius.

    Returns:
        Counts, at least 1.
    """
    pitch = np.array(readout.spacing_mm) * readout.stride
    size = -(-np.array(readout.shape) // readout.stride)
    # The last field voxel of an axis may have its centre past the grid's end.
    size -= (size - 0.5) * readout.stride - 0.5 > np.array(readout.shape) - 0.5
    flat = points.reshape(-1, 3)
    centres = (flat + 0.5) / readout.stride - 0.5
    near = readout.radius_mm / pitch
    columns = [
        np.floor(np.nan_to_num(centres[:, axis, None]))
        + np.arange(-math.floor(near[axis]), math.floor(near[axis]) + 2)
        for axis in (0, 1)
    ]
    di, dj = (
        np.where(
            (column >= 0) & (column < size[axis]),
            (column - centres[:, axis, None]) * pitch[axis],
            np.inf,
        )
        for axis, column in enumerate(columns)
    )
    square = readout.radius_mm**2 - di[:, :, None] ** 2 - dj[:, None, :] ** 2
    half = np.sqrt(np.maximum(square, 0.0)) / pitch[2]
    k = centres[:, 2, None, None]
    high = np.minimum(np.floor(k + half), size[2] - 1)
    low = np.maximum(np.ceil(k - half), 0)
    counts = np.where(square >= 0, np.maximum(high - low + 1, 0), 0).sum((1, 2))
    outside = ((flat < -0.5) | (flat > np.array(readout.shape) - 0.5)).any(1)
    octant = math.pi / 6 * readout.radius_mm**3 / np.prod(pitch)
    least = np.where(outside, max(1.0, octant), 1.0)
    return np.asarray(np.maximum(counts, least).reshape(points.shape[:-1]))
