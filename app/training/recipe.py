"""What a training run is made of: every number that shapes a model, with its unit and reason."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import torch
from torch import nn

from app.geometry import Points
from app.model import IntensitySpec, find_architecture
from app.training.fit.augment import Augmentation
from app.training.options import Missing

ARCHITECTURE: Final = "monai.networks.nets:DynUNet"

SCORE_BIAS: Final = -6.0
"""Initial score: about one voxel in 400 lies within the radius of a landmark."""

WHOLE_EDGE: Final = 64
"""Edge of a training image in voxels for a network that sees the whole grid."""

VIEW_MARGIN: Final = 1.03
"""The training image is this much longer than the diagonal of the landmarks' bounding box."""


PERCENTILES: Final = IntensitySpec(method="percentile", lower=1.0, upper=99.5)
"""Holds for scans of any modality; a CT model may prefer a window."""


NORM_GROUPS: Final = 4
COPIES: Final = 2.5
"""Memory of a training step over that of its activations: 2.2 was measured on a CPU, with
batches of 2 x 64³ voxels and 45 landmarks."""

LEAST_LEVELS: Final = 3
"""Bounds that the architecture sets to ``filters``: so many, and multiples of the groups."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """All choices of a training run.

    Attributes:
        spacing_mm: Spacing of the model's grid, isotropic.
        radius_mm: Distance up to which a voxel votes for a landmark.
        tile_shape: Shape of a training image in voxels; also the model's tile if it slides.
        sees: The whole grid; tiles of it; or, as a second model, the subject in the pose that a
            first one has found: the tile is then the grid, in the frame of the mean shape.
        stride: Grid voxels per output voxel.
        filters: Channels per level; every level halves the resolution, the first by ``stride``.
        steps: Optimiser steps.
        batch: Images per step.
        rate: Peak learning rate of the one-cycle schedule.
        seed: Of everything random.
        missing: What a landmark without a position is.
        intensity: The rule for voxel values.
        augmentation: Bounds of the random poses.
        threshold: Least probability of a vote.
        cuts: Share of the steps whose scans end amid the landmarks (see
            ``app.training.fit.truncation``).
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
    missing: Missing = "unknown"
    intensity: IntensitySpec = PERCENTILES
    augmentation: Augmentation = field(default_factory=Augmentation)
    threshold: float = 0.3
    cuts: float = 0.0

    @property
    def divisor(self) -> int:
        """Voxels that a tile's edges must be multiples of."""
        return self.stride * (1 << (len(self.filters) - 1))

    def image_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """List the shapes of training images.

        A network that sees grids whole meets all shapes in service, so it is trained on several of
        about one size; otherwise its normalisation would get used to one share of background.
        """
        i, j, k = self.tile_shape
        if self.sees != "whole":
            return (self.tile_shape,)
        d = self.divisor
        longer = [(i + d, j, k - d), (i - d, j + d, k), (i, j - d, k + d)]
        flat = [(i + d, j + d, k - d), (i - d, j, k + d)]
        return (self.tile_shape, *longer, *flat)


def suggest_spacing(point_sets: Sequence[Points]) -> float:
    """Suggest a spacing at which the landmarks of any specimen fit a whole-grid image in any pose.

    Args:
        point_sets: Landmarks of every specimen, in mm, NaN where missing.

    Returns:
        The median diagonal of the landmarks' bounding boxes over the image's edge, in mm, rounded
        to two significant digits.
    """
    diagonals = [
        np.linalg.norm(np.nanmax(points, axis=0) - np.nanmin(points, axis=0))
        for points in point_sets
    ]
    spacing = VIEW_MARGIN * float(np.median(diagonals)) / WHOLE_EDGE
    return float(f"{spacing:.2g}")


def network_arguments(recipe: Recipe, landmarks: int) -> dict[str, object]:
    """List the arguments of the network: a U-Net whose stem takes the stride."""
    levels = len(recipe.filters)
    strides = [recipe.stride] + [2] * (levels - 1)
    return {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 4 * landmarks,
        "kernel_size": [3] * levels,
        "strides": strides,
        "upsample_kernel_size": strides[1:],
        "filters": list(recipe.filters),
        # Not instance norm: it takes away whatever is the same all over a scan, such as its pose.
        "norm_name": ["GROUP", {"num_groups": NORM_GROUPS, "affine": True}],
    }


def build_network(recipe: Recipe, landmarks: int) -> nn.Module:
    """Build the network with fresh weights and low scores, as most voxels are no landmark."""
    architecture = find_architecture("training", ARCHITECTURE)
    network = architecture(**network_arguments(recipe, landmarks))
    head = head_of(network)
    if head is not None and head.bias is not None:
        with torch.no_grad():
            head.bias[:landmarks] = SCORE_BIAS
    return network


def head_of(network: nn.Module) -> nn.Conv3d | None:
    """Find the layer that makes the output: the last convolution; None if there is none."""
    found = [module for module in network.modules() if isinstance(module, nn.Conv3d)]
    return found[-1] if found else None


def network_bytes(recipe: Recipe, landmarks: int) -> float:
    """Estimate the memory that a training step takes: all activations, kept for the way back.

    They are counted on a network without memory of its own; their gradients, and copies that
    convolutions make, are of about the same size.
    """
    counted: list[int] = []
    with torch.device("meta"):
        network = build_network(recipe, landmarks)
        images = torch.empty(recipe.batch, 1, *recipe.tile_shape)
    for module in network.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, __, out: counted.append(out.numel()))
    network(images)
    return COPIES * 4 * sum(counted)
