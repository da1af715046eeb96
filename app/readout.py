"""Grid + Manifest -> Readout: where votes are counted, and where that is."""

from dataclasses import dataclass
from typing import Final

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
