"""Readout: the grid that votes point into, and how modes are read from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, SupportsIndex

import numpy as np
from jaxtyping import Bool, Float64

from app.errors import BadParameter
from app.geometry import Affine, is_inside
from app.model import Manifest
from app.preprocessing import Grid, ScanExtent

REACH: Final = 0.6
"""Share of the voting radius within which votes count for a mode: the measured optimum."""

ROUNDING: Final = 1e-9
"""By what share a radius of one voxel may miss it, as both are scaled to a subject's size."""

HEATMAP_REACH: Final = 1.25
"""Of the radius, as networks' heatmaps are often wider than those that they were trained with."""


@dataclass(frozen=True, slots=True)
class Readout:
    """Where votes are counted, and within what distance.

    Attributes:
        landmarks: How many landmarks there are.
        shape: Shape of the grid in voxels.
        spacing_mm: Spacing of the grid along its axes.
        radius_mm: The network votes from voxels within this distance of a landmark: at least the
            shortest edge of a voxel.
        stride: Grid voxels per field voxel.
        scan: Where the scan lies, if the grid reaches past it; None: the grid ends where it does.
        heatmap_threshold: Share of its peak to which a heatmap falls at ``radius_mm``, and least
            value of a vote; None: votes are not the voxels of heatmaps.
        votes_each: How many votes each landmark has, which scatter by ``radius_mm`` at most; None:
            as many as there are voxels that pass.
        round_in_voxels: Whether a heatmap is as wide along all axes in voxels, and not in mm;
            ``radius_mm`` is then in voxels of the same volume with edges of one length.

    Raises:
        BadParameter: One of them is no such number.
    """

    landmarks: int
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    radius_mm: float
    stride: int = 1
    scan: ScanExtent | None = None
    heatmap_threshold: float | None = None
    votes_each: int | None = None
    round_in_voxels: bool = False

    def __post_init__(self) -> None:
        """Refuse other numbers: by most of them landmarks would be wrong, or none be found."""
        check_lengths("shape", self.shape)
        for name in ("landmarks", "stride", "votes_each"):
            if (count := getattr(self, name)) is not None and not _is_count(count):
                raise BadParameter(f"{name}: expected a whole number from 1, got {count!r}")
        spacing = self.spacing_mm
        if np.shape(spacing) != (3,) or not all(0 < mm < math.inf for mm in spacing):
            raise BadParameter(
                f"spacing_mm: expected three lengths in mm, above 0 and finite; got {spacing!r}"
            )
        if not 0 < self.radius_mm < math.inf:
            raise BadParameter(
                f"radius_mm: expected a length in mm, above 0 and finite; got {self.radius_mm!r}"
            )
        # In a ball that holds no voxel but its centre's, any single vote makes a landmark.
        if self.radius_mm < (1 - ROUNDING) * min(spacing):
            raise BadParameter(
                f"radius_mm: expected {min(spacing):g} mm, the shortest edge of a voxel, or more; "
                f"got {self.radius_mm!r}"
            )
        threshold = self.heatmap_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise BadParameter(
                f"heatmap_threshold: expected a share between 0 and 1, got {threshold!r}"
            )

    @property
    def metric_mm(self) -> Float64[np.ndarray, " 3"]:
        """Spacing by which distances between votes count: that in which heatmaps are round."""
        spacing = np.array(self.spacing_mm, np.float64)
        return np.full(3, np.cbrt(spacing.prod())) if self.round_in_voxels else spacing

    @property
    def reach_mm(self) -> float:
        """Distance from a mode within which votes count for it.

        Votes that point to a landmark gather closer than the voxels lie that cast them.
        """
        if self.heatmap_threshold is not None:
            return HEATMAP_REACH * self.radius_mm
        return REACH * self.radius_mm

    @property
    def ideal_weight(self) -> float:
        """Mean weight of the voxels that vote for a landmark which is surely there.

        1, but for heatmaps the mean of a Gaussian over the ball in which it reaches the threshold.
        """
        if self.heatmap_threshold is None:
            return 1.0
        edge = math.sqrt(-2 * math.log(self.heatmap_threshold))  # In standard deviations.
        total = math.sqrt(math.pi / 2) * math.erf(edge / math.sqrt(2))
        return 3 * (total - edge * self.heatmap_threshold) / edge**3

    def contains(self, points: Float64[np.ndarray, "*n 3"]) -> Bool[np.ndarray, "*n"]:
        """Test which points lie in the grid and in its scan, up to the outermost voxels' faces.

        Args:
            points: In grid voxels; NaN lies nowhere.
        """
        inside = is_inside(points, self.shape)
        return inside if self.scan is None else inside & self.scan.contains(points)


@dataclass(frozen=True, slots=True)
class GridFrame:
    """Where a grid lies.

    Attributes:
        to_volume: Grid voxel index -> index of the uploaded array.
        to_world: Grid voxel index -> mm, RAS.

    Raises:
        BadParameter: One of them is no such map.
    """

    to_volume: Affine
    to_world: Affine

    def __post_init__(self) -> None:
        """Refuse other arrays: of one for row vectors, the translation would be left out."""
        for name, affine in (("to_volume", self.to_volume), ("to_world", self.to_world)):
            is_array = isinstance(affine, np.ndarray) and affine.shape == (4, 4)
            if not is_array or not np.isfinite(affine).all():
                raise BadParameter(
                    f"{name}: expected a NumPy array of 4 x 4 finite numbers, got {affine!r}"
                )
            if not np.allclose(affine[3], (0, 0, 0, 1)):
                raise BadParameter(f"{name}: expected 0 0 0 1 as last row, got {affine[3]!r}")


def make_readout(grid: Grid, manifest: Manifest) -> Readout:
    """Make the read-out of a model's votes on a grid."""
    i, j, k = grid.voxels.shape
    voting, network = manifest.voting, manifest.network
    # A posed grid's spacing is in mm of the subject; the radius was learned in mm of the frame.
    scale = grid.spacing_mm[0] / manifest.input.spacing_mm[0]
    radius_mm = scale * voting.radius_mm
    if network.votes_each is not None:  # The grid bounds it: further away no vote says anything.
        radius_mm = math.dist((0, 0, 0), np.array((i, j, k)) * grid.spacing_mm)
    return Readout(
        landmarks=len(manifest.landmarks),
        shape=(i, j, k),
        spacing_mm=grid.spacing_mm,
        radius_mm=radius_mm,
        stride=network.output_stride,
        scan=grid.scan,
        heatmap_threshold=voting.threshold if network.output == "heatmaps" else None,
        votes_each=network.votes_each,
        round_in_voxels=voting.round_in == "voxels",
    )


def check_lengths(name: str, lengths: Sequence[int]) -> None:
    """Check the lengths of the axes of an array, in voxels.

    Raises:
        BadParameter: They are not three whole numbers from 1.
    """
    if np.shape(lengths) != (3,) or not all(map(_is_count, lengths)):
        raise BadParameter(
            f"{name}: expected three whole numbers from 1, the voxels along i, j and k; "
            f"got {lengths!r}"
        )


def _is_count(number: SupportsIndex) -> bool:
    """Return whether a number, of Python or of an array, is whole and at least 1."""
    try:
        return number.__index__() >= 1
    except (AttributeError, TypeError):
        return False
