"""Every number that shapes a model; field names are the keys of ``recipe.json``."""

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from app.model import IntensitySpec
from app.training.options import Missing, Precision

WHOLE_EDGE: Final = 64
"""Edge of a training image in voxels for a network that sees the whole grid."""

UPRIGHT_DEG: Final = 45.0
"""Scans that are turned by no more than this keep their own proportions in a training image."""

PERCENTILES: Final = IntensitySpec(method="percentile", lower=1.0, upper=99.5)
"""Suits scans of any modality; a CT model may prefer a window."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Bounds of the random poses and intensities.

    Attributes:
        rotation_deg: Largest rotation about a random axis; from 180 on, uniform over all rotations.
        scale: Largest relative change of overall size.
        stretch: Largest relative change of size along one axis.
        shift_mm: Standard deviation of the position of the image's centre, per axis.
        place: Where the image's centre lies before it is shifted: in the middle of the landmarks,
            for a network that sees scans whole, or anywhere in the scan, for one that sees tiles.
        elastic_mm: Standard deviation of the control points of the elastic deformation, per axis.
        elastic_knots: Its control points along each axis.
        crop: Probability that a slab of the image is blanked, as if it lay outside the scan.
        reflect: Probability that the image continues beyond the scan's border, as its reflection.
        field: Longest edges of an image, in those of the usual ones, for networks that see scans
            whole: some scans show more around the subject.
        contrast: Probability that values go through a random curve and a random bias field, as if
            another scanner or sequence had taken the scan.
        degrade: Probability that the image is blurred and noisy, as if the scan were worse.
    """

    rotation_deg: float = 180.0
    scale: float = 0.1
    stretch: float = 0.03
    shift_mm: float = 0.0
    place: Literal["middle", "anywhere"] = "middle"
    elastic_mm: float = 0.0
    elastic_knots: int = 5
    crop: float = 0.05
    reflect: float = 0.0
    field: float = 1.0
    contrast: float = 0.0
    degrade: float = 0.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """All choices of a training.

    Attributes:
        spacing_mm: Spacing of the model's grid, isotropic.
        radius_mm: Distance up to which a voxel votes for a landmark.
        tile_shape: Shape of a training image in voxels; also the model's tile unless it sees scans
            whole.
        sees: Input of the network: the whole grid; tiles of it; or, for a second network, the
            subject in the pose that the first one has found, in the frame of the mean shape.
        stride: Grid voxels per output voxel.
        filters: Channels per level; every level halves the resolution, the first by ``stride``.
        steps: Optimiser steps.
        batch: Images per step.
        rate: Peak learning rate of the one-cycle schedule.
        seed: Random seed.
        precision: Of the network's passes; weights and sums are float32 in both.
        missing: How a landmark without a position counts.
        intensity: The rule for voxel values.
        augmentation: Bounds of the random poses.
        threshold: Lowest probability of a vote.
        cuts: Share of the steps whose scans are truncated (see ``app.training.fit.truncation``).
    """

    spacing_mm: float
    radius_mm: float
    tile_shape: tuple[int, int, int] = (WHOLE_EDGE, WHOLE_EDGE, WHOLE_EDGE)
    sees: Literal["whole", "tiles", "posed"] = "whole"
    stride: Literal[1, 2] = 2
    filters: tuple[int, ...] = (24, 48, 96, 128)
    steps: int = 4500
    batch: int = 2
    rate: float = 2e-3
    seed: int = 1
    precision: Precision = "float32"
    missing: Missing = "unknown"
    intensity: IntensitySpec = PERCENTILES
    augmentation: Augmentation = field(default_factory=Augmentation)
    threshold: float = 0.3
    cuts: float = 0.0

    @property
    def divisor(self) -> int:
        """Number of voxels that a tile's edges must be multiples of."""
        return self.stride * (1 << (len(self.filters) - 1))

    @property
    def is_upright(self) -> bool:
        """Whether scans are hardly turned, so that subjects lie as their affine says."""
        return self.augmentation.rotation_deg <= UPRIGHT_DEG

    @property
    def largest_shape(self) -> tuple[int, int, int]:
        """About the largest shape of training images, for the memory that they take."""
        edges = (math.ceil(edge * self.augmentation.field) for edge in self.tile_shape)
        i, j, k = (-(-edge // self.divisor) * self.divisor for edge in edges)
        return (i, j, k)

    def image_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """List the shapes of training images.

        A network that sees whole grids meets all shapes in service, so it is trained on several of
        about one size; otherwise its normalisation would adapt to one share of background.
        """
        i, j, k = self.tile_shape
        if self.sees != "whole":
            return (self.tile_shape,)
        d = self.divisor
        longer = [(i + d, j, k - d), (i - d, j + d, k), (i, j - d, k + d)]
        flat = [(i + d, j + d, k - d), (i - d, j, k + d)]
        return (self.tile_shape, *(shape for shape in (*longer, *flat) if min(shape) > 0))
