"""Specimen -> Sample: random rotation, size, position, elastic deformation and intensities.

A sample is an image on a model grid and the landmarks' positions in its voxels. All randomness
comes from one NumPy generator, so that a seed determines a training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy.spatial.transform import Rotation
from torch import Tensor
from torch.nn import functional

from app.geometry import Affine, Points, scaling, transform, translation
from app.preprocessing import index_grid, smooth
from app.training.data.specimens import Specimen
from app.training.recipe import Augmentation

NEAR_LANDMARK: Final = 0.75
"""Share of the images placed anywhere that show a chosen landmark; few others show one."""

CONTRAST_KNOTS: Final = 5
"""Values of a random contrast curve above 0, evenly spaced: tissues of one scan are fewer."""

BIAS: Final = 0.3
"""Standard deviation of the logarithm of a random bias field, at its control points."""

BIAS_KNOTS: Final = 3
"""Its control points along each axis: coils are large."""

MAX_BLUR_VOXELS: Final = 2.0
"""Largest standard deviation of the blur of a degraded image, along each axis."""

MAX_NOISE: Final = 0.5
"""Largest standard deviation of its noise, of values around [0, 1]."""

SHOWN: Final = (0.01, 0.995)
"""Quantiles of a degraded image that its widest window maps to 0 and 1, as models mostly do."""

MIN_WINDOW: Final = 0.05
"""Least width of such a window: an image without contrast stays so."""

MAX_OFF_VOXELS: Final = 0.5
"""By which a landmark of an image may lie beside where the image shows it."""

Vector = Float64[np.ndarray, " 3"]
Knots = Float64[np.ndarray, "a b c n"]
"""Values of a smooth field at its control points, such as displacements in voxels (n = 3)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An image on a model grid with its landmarks.

    Attributes:
        image: Values, (1 i j k).
        points: Landmarks in voxels of the image, NaN where there is none.
        visible: False where a part of the scan was blanked.
        absent: Rows of landmarks that are known not to be in the scan.
    """

    image: Float[Tensor, "1 i j k"]
    points: Points
    visible: Bool[Tensor, "i j k"]
    absent: frozenset[int] = frozenset()


def draw_sample(
    specimen: Specimen,
    shape: Sequence[int],
    spacing_mm: float,
    augmentation: Augmentation,
    rng: np.random.Generator,
) -> Sample:
    """Draw one random sample of a specimen: an image of a shape in voxels, of isotropic spacing.

    As in service, the image is exactly 0 outside the scan.
    """
    extent_mm = np.asarray(shape) * spacing_mm
    centre = draw_centre(specimen, extent_mm, augmentation, rng)
    world_from_image = draw_affine(centre, shape, spacing_mm, augmentation, rng)
    voxel_from_image = np.linalg.inv(specimen.to_world) @ world_from_image
    elastic_voxels = augmentation.elastic_mm / spacing_mm
    knots = elastic_voxels * rng.standard_normal((*[augmentation.elastic_knots] * 3, 3))
    # The knots are rotated instead of the displacements of the many voxels.
    rotated = knots @ voxel_from_image[:3, :3].T
    index = index_grid(shape, voxel_from_image) + interpolate_grid(rotated, shape)
    if rng.random() < augmentation.reflect:
        index = reflect(index, specimen.voxels.shape)
    image = specimen.values_at(index)
    if rng.random() < augmentation.contrast:
        image = change_contrast(image, rng)
    # Nothing is drawn for recipes without it, so that these draw what they always drew.
    if augmentation.degrade and rng.random() < augmentation.degrade:
        image = degrade(image, rng)
    points = transform(np.linalg.inv(world_from_image), specimen.points)
    deformed = invert_deformation(points, knots, shape)
    visible = draw_visible(shape, augmentation, rng)
    shown = visible & in_reach(index, specimen.voxels.shape)
    image = (jitter(image, rng) * shown)[None]
    return Sample(image, points=deformed, visible=visible, absent=specimen.absent)


def draw_centre(
    specimen: Specimen, extent_mm: Vector, augmentation: Augmentation, rng: np.random.Generator
) -> Vector:
    """Draw the position in the scan of the image's centre, in mm, RAS.

    Anywhere: mostly so that a random landmark is as likely at the image's border, where it is cut
    off, as in its centre; else uniform over the voxels of the scan, as it is without a landmark.
    """
    present = specimen.points[np.isfinite(specimen.points).all(axis=1)]
    if augmentation.place == "middle" and len(present):
        middle = specimen.middle
        return np.asarray(np.nanmean(specimen.points, axis=0) if middle is None else middle)
    if len(present) and rng.random() < NEAR_LANDMARK:
        # The image is rotated at random, so its own axes do as well as any others here.
        return np.asarray(rng.choice(present) + rng.uniform(-0.5, 0.5, 3) * extent_mm)
    index = rng.uniform(0, np.asarray(specimen.voxels.shape) - 1)
    return transform(specimen.to_world, index)


def draw_affine(
    centre: Vector,
    shape: Sequence[int],
    spacing_mm: float,
    augmentation: Augmentation,
    rng: np.random.Generator,
) -> Affine:
    """Draw the affine from image voxels to world mm, with the given position near the centre."""
    rotation = random_rotation(augmentation.rotation_deg, rng)
    size = (1 + augmentation.scale * rng.uniform(-1, 1)) * (
        1 + augmentation.stretch * rng.uniform(-1, 1, 3)
    )
    shift = augmentation.shift_mm * rng.standard_normal(3)
    image_centre = (np.asarray(shape) - 1) / 2
    return np.asarray(
        translation(centre)
        @ rotation
        @ scaling(1 / size)
        @ translation(shift)
        @ scaling([spacing_mm] * 3)
        @ translation(-image_centre)
    )


def random_rotation(max_deg: float, rng: np.random.Generator) -> Affine:
    """Draw a rotation about a random axis; from 180 degrees on, uniform over all rotations."""
    if max_deg >= 180.0:
        rotation = Rotation.random(random_state=rng)
    else:
        axis = rng.standard_normal(3)
        angle = np.deg2rad(max_deg) * rng.uniform(-1, 1)
        rotation = Rotation.from_rotvec(axis / np.linalg.norm(axis) * angle)
    affine = np.eye(4)
    affine[:3, :3] = rotation.as_matrix()
    return affine


def interpolate_grid(knots: Knots, shape: Sequence[int]) -> Float[Tensor, "i j k n"]:
    """Interpolate a smooth field at all voxels of an image, axis by axis; as ``interpolate_at``."""
    field = torch.from_numpy(knots).float()
    for axis, size in enumerate(shape):
        count = knots.shape[axis]
        position = torch.linspace(0, count - 1, size)[:, None]
        weights = (1 - (position - torch.arange(count)).abs()).clamp_min(0)
        # Contracts the first axis and appends the new one, so the axes come last in order.
        field = torch.tensordot(field, weights, dims=([0], [1]))
    return field.movedim(0, -1)


def interpolate_at(
    index: Float[Tensor, "*n 3"], knots: Knots, shape: Sequence[int]
) -> Float[Tensor, "*n 3"]:
    """Interpolate displacements at fractional image indices."""
    unit = 2 * index / (torch.tensor(shape) - 1) - 1
    field = torch.from_numpy(knots).float().permute(3, 0, 1, 2)[None]
    flat = unit.flip(-1).reshape(1, 1, 1, -1, 3)
    moved = functional.grid_sample(field, flat, align_corners=True, padding_mode="border")
    return moved[0].reshape(3, -1).T.reshape(index.shape)


def invert_deformation(points: Points, knots: Knots, shape: Sequence[int]) -> Points:
    """Find where the deformed image shows a point, by fixed-point iteration.

    The displacement mostly changes by far less than a voxel per voxel, so ten steps reach float
    precision. Where a strong deformation changes by more, and may even fold the image, they may
    lead nowhere: such a point is NaN, as it is not known where it is shown.
    """
    target = torch.from_numpy(np.nan_to_num(points)).float()
    found = target.clone()
    for _ in range(10):
        found = target - interpolate_at(found, knots, shape)
    off = (found + interpolate_at(found, knots, shape) - target).norm(dim=-1)
    result = found.double().numpy()
    result[~np.isfinite(points)] = np.nan
    result[(off > MAX_OFF_VOXELS).numpy()] = np.nan
    return np.asarray(result)


def draw_visible(
    shape: Sequence[int], augmentation: Augmentation, rng: np.random.Generator
) -> Bool[Tensor, "i j k"]:
    """Draw which part of the image is visible: sometimes a slab at one side is blanked."""
    visible = torch.ones(tuple(shape), dtype=torch.bool)
    if rng.random() < augmentation.crop:
        axis, side = int(rng.integers(3)), int(rng.integers(2))
        width = int(shape[axis] * rng.uniform(0.1, 0.45))
        start = 0 if side == 0 else shape[axis] - width
        visible.narrow(axis, start, width).fill_(False)
    return visible


def in_reach(index: Float[Tensor, "i j k 3"], shape: Sequence[int]) -> Bool[Tensor, "i j k"]:
    """Return where the interpolation of a scan at fractional indices uses any of its voxels."""
    return ((index > -1) & (index < torch.tensor(shape))).all(dim=-1)


def reflect(index: Float[Tensor, "i j k 3"], shape: Sequence[int]) -> Float[Tensor, "i j k 3"]:
    """Fold fractional indices back into a scan at its outermost voxels, as often as it takes."""
    last = torch.tensor(shape) - 1.0
    # Of an axis of one voxel, all that is folded back is that voxel.
    return (last - (index.remainder(2 * last.clamp_min(0.5)) - last).abs()).clamp_min_(0.0)


def change_contrast(
    image: Float[Tensor, "i j k"], rng: np.random.Generator
) -> Float[Tensor, "i j k"]:
    """Map values around [0, 1] by a random curve, and multiply them by a random bias field.

    The curve is piecewise linear with random values at its knots, so that bright tissues may become
    dark ones, and it keeps 0 at 0: air is dark in any contrast.
    """
    curve = torch.tensor([0.0, *rng.uniform(0.0, 1.0, CONTRAST_KNOTS)], dtype=torch.float32)
    position = image.clamp(0.0, 1.0) * CONTRAST_KNOTS
    below = position.long().clamp_max(CONTRAST_KNOTS - 1)
    mapped = torch.lerp(curve[below], curve[below + 1], position - below)
    knots = BIAS * rng.standard_normal((*[BIAS_KNOTS] * 3, 1))
    return mapped * interpolate_grid(knots, image.shape)[..., 0].exp()


def degrade(image: Float[Tensor, "i j k"], rng: np.random.Generator) -> Float[Tensor, "i j k"]:
    """Blur values around [0, 1] and add noise, as if the scan were worse.

    In random order, as the noise of a scan that was smoothed is smooth, too. A service finds the
    percentiles that it scales values by in the worse scan, at one spacing for both networks: the
    window is widened or narrowed at random up to what shows all of the image.
    """
    widths = (MAX_BLUR_VOXELS * rng.uniform() * rng.uniform(0, 1, 3)).tolist()
    noise = MAX_NOISE * rng.uniform() ** 2 * standard_normal(image.shape, rng)
    image = smooth(image + noise, widths) if rng.random() < 0.5 else smooth(image, widths) + noise
    shown = np.quantile(image[::2, ::2, ::2].numpy(), SHOWN)
    lower, upper = rng.uniform() * (shown - [0.0, 1.0])
    return image.sub_(lower).div_(max(1.0 + upper - lower, MIN_WINDOW)).clamp_(0.0, 1.0)


def standard_normal(shape: Sequence[int], rng: np.random.Generator) -> Float[Tensor, "i j k"]:
    """Draw independent values of a standard normal distribution."""
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
    return torch.randn(tuple(shape), generator=generator)


def jitter(image: Float[Tensor, "i j k"], rng: np.random.Generator) -> Float[Tensor, "i j k"]:
    """Draw random contrast, brightness, gamma and noise for values around [0, 1]."""
    gamma = float(np.exp(rng.normal(0, 0.15)))
    contrast = float(np.exp(rng.normal(0, 0.1)))
    noise = float(rng.uniform(0, 0.03))
    drawn = standard_normal(image.shape, rng)
    image = image.clamp_min(0.0).pow(gamma) * contrast + float(rng.normal(0, 0.02))
    return image + noise * drawn
