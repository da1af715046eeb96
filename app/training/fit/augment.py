"""Specimen -> posed sample: random rotation, size, place, mild elastic warp and intensities.

A sample is an image on a model grid and the landmarks' positions in its voxels. All randomness
comes from one NumPy generator, so a seed names a training run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy.spatial.transform import Rotation
from torch import Tensor
from torch.nn import functional

from app.geometry import Affine, Points, scaling, transform, translation
from app.preprocessing import index_grid, sample_at
from app.training.data.specimens import Specimen

NEAR_LANDMARK: Final = 0.75
"""Share of the images placed anywhere that show a chosen landmark; few others show one."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """How far a pose and its intensities may go.

    Attributes:
        rotation_deg: Largest rotation about a random axis; 180 is every rotation alike.
        scale: Largest relative change of size of the whole.
        stretch: Largest relative change of size of one axis.
        shift_mm: Standard deviation of the place of the image's middle, per axis.
        place: Where the image's middle lies before it is shifted: in the middle of the landmarks,
            for a network that sees scans whole, or anywhere in the scan, for one that sees tiles.
        elastic_mm: Standard deviation of the control points of the warp, per axis.
        elastic_knots: Control points of the warp along each axis.
        crop: Chance that a part of the image is blanked out, as if it lay outside the scan.
    """

    rotation_deg: float = 180.0
    scale: float = 0.1
    stretch: float = 0.03
    shift_mm: float = 1.5
    place: Literal["middle", "anywhere"] = "middle"
    elastic_mm: float = 0.15
    elastic_knots: int = 5
    crop: float = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """An image on a model grid with its landmarks.

    Attributes:
        image: Values, (1 i j k).
        points: Landmarks in voxels of the image, NaN where there is none.
        visible: False where a part of the scan was blanked out.
    """

    image: Float[Tensor, "1 i j k"]
    points: Points
    visible: Bool[Tensor, "i j k"]


def pose(
    specimen: Specimen,
    shape: Sequence[int],
    spacing_mm: float,
    augmentation: Augmentation,
    rng: np.random.Generator,
) -> Sample:
    """Draw one random pose of a specimen.

    Args:
        specimen: The scan and its landmarks.
        shape: Shape of the image in voxels.
        spacing_mm: Spacing of the image, isotropic.
        augmentation: Bounds of the randomness.
        rng: Source of the randomness.

    Returns:
        The posed image with its landmarks.
    """
    extent_mm = np.asarray(shape) * np.asarray(spacing_mm)
    middle = draw_middle(specimen, extent_mm, augmentation, rng)
    world_from_image = random_affine(middle, shape, spacing_mm, augmentation, rng)
    voxel_from_image = np.linalg.inv(specimen.to_world) @ world_from_image
    knots = (
        augmentation.elastic_mm
        / np.asarray(spacing_mm)
        * rng.standard_normal((*[augmentation.elastic_knots] * 3, 3))
    )
    turn = voxel_from_image[:3, :3]
    # The warp turns with its knots: no displacement of the many voxels is turned one by one.
    place = index_grid(shape, voxel_from_image) + warp_grid(knots @ turn.T, shape)
    image = sample_at(specimen.voxels, place)
    points = (
        np.linalg.inv(world_from_image) @ np.c_[specimen.points, np.ones(len(specimen.points))].T
    )
    unwarped = invert_warp(points[:3].T, knots, shape)
    visible = draw_visible(shape, augmentation, rng)
    return Sample(image=jitter(image * visible, rng)[None], points=unwarped, visible=visible)


def draw_middle(
    specimen: Specimen,
    extent_mm: Float64[np.ndarray, " 3"],
    augmentation: Augmentation,
    rng: np.random.Generator,
) -> Float64[np.ndarray, " 3"]:
    """Draw which place of the scan the image shows in its middle, in mm, RAS.

    Anywhere: mostly so that one of the landmarks is as likely at the image's border, where it is
    cut, as in its middle; else any voxel of the scan alike.
    """
    if augmentation.place == "middle":
        return np.asarray(np.nanmean(specimen.points, axis=0))
    present = specimen.points[np.isfinite(specimen.points).all(axis=1)]
    if len(present) and rng.random() < NEAR_LANDMARK:
        # The image will be turned at random, so its own axes serve as well as any others here.
        return np.asarray(rng.choice(present) + rng.uniform(-0.5, 0.5, 3) * extent_mm)
    index = rng.uniform(0, np.asarray(specimen.voxels.shape) - 1)
    return transform(specimen.to_world, index)


def random_affine(
    middle: Float64[np.ndarray, " 3"],
    shape: Sequence[int],
    spacing_mm: float,
    augmentation: Augmentation,
    rng: np.random.Generator,
) -> Affine:
    """Draw the affine from image voxels to world mm that puts a place near the image's middle."""
    turn = random_rotation(augmentation.rotation_deg, rng)
    size = (1 + augmentation.scale * rng.uniform(-1, 1)) * (
        1 + augmentation.stretch * rng.uniform(-1, 1, 3)
    )
    shift = augmentation.shift_mm * rng.standard_normal(3)
    image_middle = (np.asarray(shape) - 1) / 2
    return np.asarray(
        translation(middle)
        @ turn
        @ scaling(1 / size)
        @ translation(shift)
        @ scaling([spacing_mm] * 3)
        @ translation(-image_middle)
    )


def random_rotation(largest_deg: float, rng: np.random.Generator) -> Affine:
    """Draw a rotation about a random axis; from 180 degrees on, every one alike."""
    if largest_deg >= 180.0:
        rotation = Rotation.random(random_state=rng)
    else:
        axis = rng.standard_normal(3)
        angle = np.deg2rad(largest_deg) * rng.uniform(-1, 1)
        rotation = Rotation.from_rotvec(axis / np.linalg.norm(axis) * angle)
    turn = np.eye(4)
    turn[:3, :3] = rotation.as_matrix()
    return turn


def warp_grid(
    knots: Float64[np.ndarray, "a b c 3"], shape: Sequence[int]
) -> Float[Tensor, "i j k 3"]:
    """Evaluate the elastic displacement at all voxels of an image, as ``warp_at``, by axes."""
    field = torch.from_numpy(knots).float()
    for axis, size in enumerate(shape):
        count = knots.shape[axis]
        place = torch.linspace(0, count - 1, size)[:, None]
        weights = (1 - (place - torch.arange(count)).abs()).clamp_min(0)
        # Contracts the first axis and appends the new one, so the three come last in order.
        field = torch.tensordot(field, weights, dims=([0], [1]))
    return field.movedim(0, -1)


def warp_at(
    index: Float[Tensor, "*n 3"], knots: Float64[np.ndarray, "a b c 3"], shape: Sequence[int]
) -> Float[Tensor, "*n 3"]:
    """Evaluate the elastic displacement, in voxels, at fractional image indices."""
    unit = 2 * index / (torch.tensor(shape) - 1) - 1
    field = torch.from_numpy(knots).float().permute(3, 0, 1, 2)[None]
    flat = unit.flip(-1).reshape(1, 1, 1, -1, 3)
    moved = functional.grid_sample(field, flat, align_corners=True, padding_mode="border")
    return moved[0].reshape(3, -1).T.reshape(index.shape)


def invert_warp(
    points: Points, knots: Float64[np.ndarray, "a b c 3"], shape: Sequence[int]
) -> Points:
    """Find where the warped image shows a point, by fixed-point iteration.

    The displacement changes by far less than a voxel per voxel, so ten steps reach float precision.
    """
    target = torch.from_numpy(np.nan_to_num(points)).float()
    found = target.clone()
    for _ in range(10):
        found = target - warp_at(found, knots, shape)
    result = found.double().numpy()
    result[~np.isfinite(points)] = np.nan
    return np.asarray(result)


def draw_visible(
    shape: Sequence[int], augmentation: Augmentation, rng: np.random.Generator
) -> Bool[Tensor, "i j k"]:
    """Draw which part of the image is seen: sometimes a slab at one side is not, as if cut off."""
    visible = torch.ones(tuple(shape), dtype=torch.bool)
    if rng.random() < augmentation.crop:
        axis, side = int(rng.integers(3)), int(rng.integers(2))
        width = int(shape[axis] * rng.uniform(0.1, 0.45))
        start = 0 if side == 0 else shape[axis] - width
        visible.narrow(axis, start, width).fill_(False)
    return visible


def jitter(image: Float[Tensor, "i j k"], rng: np.random.Generator) -> Float[Tensor, "i j k"]:
    """Draw random contrast, brightness, gamma and noise for values that lie around [0, 1]."""
    gamma = float(np.exp(rng.normal(0, 0.15)))
    contrast = float(np.exp(rng.normal(0, 0.1)))
    noise = float(rng.uniform(0, 0.03))
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
    image = image.clamp_min(0.0).pow(gamma) * contrast + float(rng.normal(0, 0.02))
    return image + noise * torch.randn(image.shape, generator=generator)
