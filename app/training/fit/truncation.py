"""Sample -> the same sample of a scan that ends amid the landmarks, as scans of a part do.

Scans end at planes. A network that sees a grid whole gets one that ends there, too, and whose voxel
values are set by what is left; a network that sees a fixed frame gets nothing beyond the plane.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor
from torch.nn import functional

from app.geometry import Points
from app.training.fit.augment import Sample

KEPT: Final = (0.35, 0.8)
"""Least and greatest share of the landmarks that stay: with fewer, hardly a pose is left to see."""

BRIGHTER: Final = (-0.2, 0.35)
"""Bounds of the natural logarithm of a cut scan's values over the whole one's. The percentiles that
become 0 and 1 are those of what is left: half a mouse's head made them up to 38 % brighter, where
most of the bone is cut away, and 17 % darker, where most of it stays."""

Normal = Float64[np.ndarray, " 3"]


def draw_normal(along_axes: bool, rng: np.random.Generator) -> Normal:
    """Draw which way a cut faces.

    Args:
        along_axes: Whether it is along an axis of the image, as a scan's own border is.
        rng: Source of the randomness.

    Returns:
        The normal of the plane, of length 1.
    """
    if along_axes:
        return np.asarray(np.eye(3)[int(rng.integers(3))])
    normal = rng.standard_normal(3)
    return np.asarray(normal / np.linalg.norm(normal))


def cut_sample(sample: Sample, normal: Normal, rng: np.random.Generator) -> Sample:
    """Cut a sample at a plane that leaves some of its landmarks.

    Args:
        sample: As posed.
        normal: Of the plane, in the image's axes; either side of it may stay.
        rng: Source of the randomness.

    Returns:
        The sample, beyond the plane 0 and not visible; the same one if it has no landmark.
    """
    along = sample.points[np.isfinite(sample.points).all(axis=1)] @ normal
    if not len(along):
        return sample
    side = 1.0 if rng.random() < 0.5 else -1.0
    where = float(np.quantile(side * along, rng.uniform(*KEPT)))
    brighter = float(np.exp(rng.uniform(*BRIGHTER)))
    visible = sample.visible & (_along(sample.visible.shape, side * normal) <= where)
    image = (sample.image * brighter).clamp_max(1.0) * visible
    return replace(sample, image=image, visible=visible)


def trim(samples: Sequence[Sample], divisor: int) -> list[Sample]:
    """Leave out what no sample of a batch shows, as the grid of a cut scan does.

    Args:
        samples: Of one shape, cut along axes of the image.
        divisor: Edges are multiples of this many voxels.

    Returns:
        The samples, of one shape: each begins where it begins to show something, and is padded with
        0 at its end, as a grid is.
    """
    boxes = [_box(sample.visible) for sample in samples]
    longest = np.max([last - first for first, last in boxes], axis=0)
    edges = (-(-longest // divisor) * divisor).astype(int)
    return [_slice(sample, first, edges) for sample, (first, _) in zip(samples, boxes, strict=True)]


def _along(shape: Sequence[int], normal: Normal) -> Float[Tensor, "i j k"]:
    """Say how far along a direction each voxel lies, in voxels."""
    i, j, k = (
        torch.arange(size, dtype=torch.float32) * float(part)
        for size, part in zip(shape, normal, strict=True)
    )
    return i[:, None, None] + j[:, None] + k


def _box(visible: Bool[Tensor, "i j k"]) -> tuple[np.ndarray, np.ndarray]:
    """Find the first voxel that is visible along each axis, and the one behind the last."""
    lines = [visible.any(dim=2).any(dim=1), visible.any(dim=2).any(dim=0)]
    lines.append(visible.any(dim=1).any(dim=0))
    seen = [np.flatnonzero(line.numpy()) for line in lines]
    if not all(len(line) for line in seen):
        return np.zeros(3, dtype=int), np.array(visible.shape)
    return np.array([line[0] for line in seen]), np.array([line[-1] + 1 for line in seen])


def _slice(sample: Sample, first: np.ndarray, edges: np.ndarray) -> Sample:
    """Cut a box out of a sample, with 0 where it reaches past the end."""
    part = tuple(slice(int(a), int(a + n)) for a, n in zip(first, edges, strict=True))
    i, j, k = np.maximum(first + edges - np.array(sample.visible.shape), 0).tolist()
    pad = (0, k, 0, j, 0, i)
    points: Points = sample.points - first
    return Sample(
        image=functional.pad(sample.image[(slice(None), *part)], pad),
        points=points,
        visible=functional.pad(sample.visible[part], pad),
    )
