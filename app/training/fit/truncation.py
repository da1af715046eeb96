"""Sample -> the same sample of a scan that ends among the landmarks, as some scans do.

Scans end at planes. A network that sees whole grids gets a smaller grid that ends at the plane, and
voxel values normalised by what is left. A network that sees a fixed frame gets 0 beyond the plane.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy.ndimage import find_objects
from torch import Tensor
from torch.nn import functional

from app.geometry import Points
from app.training.fit.augment import Sample

KEPT_SHARE: Final = (0.35, 0.8)
"""Bounds of the share of the landmarks that is kept: with fewer, hardly a pose can be seen."""

LOG_BRIGHTNESS: Final = (-0.2, 0.35)
"""Bounds of the logarithm of a truncated scan's values over the whole one's. The percentiles that
become 0 and 1 are those of what is left: half a mouse's head made them up to 38 % brighter, where
most of the bone is cut away, and 17 % darker, where most of it stays."""

Normal = Float64[np.ndarray, " 3"]


def draw_axis(samples: Sequence[Sample], rng: np.random.Generator) -> Normal:
    """Draw the direction of a plane: an axis of the image, as those of a scan's borders are.

    Axes are drawn in proportion to how far the landmarks extend along them: a spine is cut between
    its vertebrae.
    """
    points = np.concatenate([sample.points for sample in samples])
    known = points[np.isfinite(points).all(axis=1)]
    extent = np.ptp(known, axis=0) + 1.0 if len(known) else np.ones(3)
    return np.asarray(np.eye(3)[rng.choice(3, p=extent / extent.sum())])


def draw_normal(rng: np.random.Generator) -> Normal:
    """Draw the direction of a plane, of length 1, from all alike."""
    normal = rng.standard_normal(3)
    return np.asarray(normal / np.linalg.norm(normal))


def truncate(sample: Sample, normal: Normal, rng: np.random.Generator) -> Sample:
    """Truncate a sample at a plane among its landmarks; either side may be kept.

    The normal of the plane is in the image's axes.

    Returns:
        The sample, 0 and not visible beyond the plane; unchanged if it has no landmark.
    """
    along = sample.points[np.isfinite(sample.points).all(axis=1)] @ normal
    if not len(along):
        return sample
    side = 1.0 if rng.random() < 0.5 else -1.0
    end = float(np.quantile(side * along, rng.uniform(*KEPT_SHARE)))
    brightness = float(np.exp(rng.uniform(*LOG_BRIGHTNESS)))
    visible = sample.visible & (_along(sample.visible.shape, side * normal) <= end)
    image = (sample.image * brightness).clamp_max(1.0) * visible
    return replace(sample, image=image, visible=visible)


def trim(samples: Sequence[Sample], divisor: int) -> list[Sample]:
    """Crop a batch to what is visible, as the grid of a truncated scan is smaller.

    Args:
        samples: Of one shape, truncated along axes of the image.
        divisor: Edges are multiples of this many voxels.

    Returns:
        The samples, of one shape: each starts at its first visible voxel, and is padded with 0 at
        its end, as a grid is.
    """
    boxes = [_visible_box(sample.visible) for sample in samples]
    longest = np.max([last - first for first, last in boxes], axis=0)
    edges = (-(-longest // divisor) * divisor).astype(int)
    return [_crop(sample, first, edges) for sample, (first, _) in zip(samples, boxes, strict=True)]


def _along(shape: Sequence[int], normal: Normal) -> Float[Tensor, "i j k"]:
    """Compute the coordinate of each voxel along a direction, in voxels."""
    i, j, k = (
        torch.arange(size, dtype=torch.float32) * float(part)
        for size, part in zip(shape, normal, strict=True)
    )
    return i[:, None, None] + j[:, None] + k


def _visible_box(visible: Bool[Tensor, "i j k"]) -> tuple[np.ndarray, np.ndarray]:
    """Find the first visible voxel along each axis, and the one after the last; else all voxels."""
    boxes = find_objects(visible.byte().numpy()) or [[slice(0, size) for size in visible.shape]]
    return np.array([box.start for box in boxes[0]]), np.array([box.stop for box in boxes[0]])


def _crop(sample: Sample, first: np.ndarray, edges: np.ndarray) -> Sample:
    """Crop a box out of a sample, with 0 where it reaches past the end."""
    part = tuple(slice(int(a), int(a + n)) for a, n in zip(first, edges, strict=True))
    i, j, k = np.maximum(first + edges - np.array(sample.visible.shape), 0).tolist()
    pad = (0, k, 0, j, 0, i)
    points: Points = sample.points - first
    return replace(
        sample,
        image=functional.pad(sample.image[(slice(None), *part)], pad),
        points=points,
        visible=functional.pad(sample.visible[part], pad),
    )
