"""Grid + Manifest -> Readout: where votes are counted, and where that is."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from app.geometry import Affine, transform
from app.model import Manifest
from app.preprocessing import Grid

REACH: Final = 0.6
"""Votes are read out within this share of the radius in which voxels vote (measured optimum)."""


@dataclass(frozen=True, slots=True)
class Cover:
    """The part of a grid that its scan covers, where the grid reaches past the scan.

    Attributes:
        to_volume: Grid voxel index -> index of the uploaded array.
        shape: Of the uploaded array.
    """

    to_volume: Affine
    shape: tuple[int, ...]

    def holds(self, points: Float64[np.ndarray, "*n 3"]) -> Bool[np.ndarray, "*n"]:
        """Say which places lie in the scan, up to the faces of its outermost voxels.

        Args:
            points: In grid voxels; NaN lies nowhere.
        """
        return _within(transform(self.to_volume, points), self.shape)


@dataclass(frozen=True, slots=True)
class Readout:
    """Where and how votes are counted.

    Attributes:
        landmarks: How many landmarks there are.
        shape: Shape of the grid in voxels.
        spacing_mm: Spacing of the grid along its axes.
        radius_mm: The network votes from voxels within this distance of a landmark.
        stride: Grid voxels per field voxel.
        cover: The part of the grid in which there is a scan; None: all of it.
    """

    landmarks: int
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    radius_mm: float
    stride: int = 1
    cover: Cover | None = None

    @property
    def reach_mm(self) -> float:
        """Distance from a mode within which votes count for it."""
        return REACH * self.radius_mm

    def holds(self, points: Float64[np.ndarray, "*n 3"]) -> Bool[np.ndarray, "*n"]:
        """Say which places lie in the grid and in its scan, up to the outermost voxels' faces.

        Args:
            points: In grid voxels; NaN lies nowhere.
        """
        inside = _within(points, self.shape)
        return inside if self.cover is None else inside & self.cover.holds(points)


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
        stride=manifest.network.output_stride,
        cover=None if grid.scan is None else Cover(grid.to_volume, grid.scan),
    )


@np.errstate(invalid="ignore")
def _within(points: Float64[np.ndarray, "*n 3"], shape: tuple[int, ...]) -> Bool[np.ndarray, "*n"]:
    """Say which places lie in an array, up to the faces of its outermost voxels."""
    return np.asarray(((points >= -0.5) & (points <= np.array(shape) - 0.5)).all(axis=-1))
