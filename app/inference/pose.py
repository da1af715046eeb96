"""Landmarks found roughly -> pose -> Grid: the scan in the pose of a mean shape.

A model that sees a whole scan in any pose finds every landmark, none of them to a fraction of a
voxel of its coarse grid. All of them together tell the pose of the subject far better than that. In
this pose, and turned back to the mean shape's, every subject looks nearly alike: a second network,
which has seen nothing else, at a finer spacing, need not know poses and is several times closer.

The posed grid is one tile, fixed in the frame of the second model's mean shape, with the origin of
that frame in its middle. It covers a fraction of the subject's size more or less, as the fit is a
similarity: one millimetre of the frame is ``scale`` millimetres of the subject.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from app.compute import Voxels, upload
from app.geometry import Affine, scaling, spacing_of, transform, translation
from app.io import Volume
from app.model import WHOLE, InputSpec
from app.preprocessing import KERNEL_RADIUS_SIGMAS, Grid, apply_along, gaussians
from app.voting import Landmark, Shape, Similarity, fit_constellation, fit_similarity

SIDES: Final = (
    ((1, 2, 0), (1, 1, 1)),
    ((0, 1, 2), (-1, -1, 1)),
    ((2, 0, 1), (-1, 1, -1)),
    ((0, 2, 1), (1, 1, -1)),
    ((2, 1, 0), (-1, 1, 1)),
)
"""Other sides to see a grid from: which axis comes where, and which way it points. All of them are
rotations, none a mirror image, and no two differ by less than a quarter turn."""


@dataclass(frozen=True, slots=True)
class Pose:
    """Where a subject lies.

    Attributes:
        to_world: Mean shape's frame in mm -> mm, RAS: rotation, translation and scale.
        scale: Size of the subject over that of the mean shape.
    """

    to_world: Affine
    scale: float


def find_pose(landmarks: Sequence[Landmark], shape: Shape) -> Pose | None:
    """Fit a mean shape to landmarks that were found.

    Args:
        landmarks: Of the first model, in the order of the shape.
        shape: Mean shape of the second model, and how far off a landmark may be to have a say.

    Returns:
        The pose; None if fewer than four landmarks, or too few of them, agree on one.
    """
    nowhere = np.full(3, np.nan)
    found = np.stack([nowhere if mark.ras_mm is None else mark.ras_mm for mark in landmarks])
    strength = np.array([0.0 if mark.ras_mm is None else mark.confidence for mark in landmarks])
    fit = fit_constellation(found[:, None], strength[:, None], shape)
    if fit is None:
        return None
    agree = fit.choice >= 0
    return pose_of(fit_similarity(shape.mean[agree], found[agree], np.ones(int(agree.sum()))))


def pose_of(similarity: Similarity) -> Pose:
    """Write a similarity from the mean shape's frame as a pose."""
    to_world = np.eye(4)
    to_world[:3, :3] = similarity.scale * similarity.rotation
    to_world[:3, 3] = similarity.translation
    return Pose(to_world, float(similarity.scale))


def make_posed_grid(
    volume: Volume,
    pose: Pose,
    spec: InputSpec,
    window: tuple[float, float],
    device: torch.device,
) -> Grid:
    """Sample a scan on the grid of the second model.

    Args:
        volume: The scan.
        pose: Where the subject lies in it.
        spec: Spacing and tile of the second model; the tile is the grid.
        window: Voxel values that become 0 and 1: those that the first model's grid was made with.
        device: Where the grid shall live.

    Returns:
        The grid; its spacing is in mm of the subject. Outside the scan it is 0.
    """
    if spec.tile_shape == WHOLE:
        raise ValueError("expected a second model with a tile of its own, got one of the whole")
    shape = np.array(spec.tile_shape)
    frame_from_grid = scaling(list(spec.spacing_mm)) @ translation(-(shape - 1) / 2)
    to_world = pose.to_world @ frame_from_grid
    to_volume = np.linalg.inv(volume.affine) @ to_world
    step = spacing_of(to_world) / spacing_of(volume.affine).min()
    values, first = _crop(volume, to_volume, shape, float(step.max()))
    lower, upper = window
    # In the scan's own order: smoothing and sampling take any.
    fine = upload(values, device, "K")
    fine = fine.sub_(lower).div_(max(upper - lower, 1e-6)).clamp_(0.0, 1.0)
    fine = smooth_for(fine, pose.scale * max(spec.spacing_mm), volume.affine)
    voxels = sample_at(
        fine, index_grid(spec.tile_shape, translation((-first).tolist()) @ to_volume, device)
    )
    i, j, k = (pose.scale * mm for mm in spec.spacing_mm)
    return Grid(voxels, to_volume, to_world, (i, j, k), window, scan=volume.voxels.shape)


def turn_grid(grid: Grid, side: int) -> Grid:
    """See a grid from another side; no voxel changes.

    Args:
        grid: The grid.
        side: Which one of ``SIDES``.

    Returns:
        The same voxels in another order.
    """
    order, signs = SIDES[side]
    old_from_new = np.zeros((4, 4))
    old_from_new[3, 3] = 1.0
    for new, (old, sign) in enumerate(zip(order, signs, strict=True)):
        old_from_new[old, new] = sign
        old_from_new[old, 3] = grid.voxels.shape[old] - 1 if sign < 0 else 0.0
    flips = [axis for axis, sign in enumerate(signs) if sign < 0]
    i, j, k = (grid.spacing_mm[axis] for axis in order)
    return replace(
        grid,
        voxels=grid.voxels.permute(order).flip(flips).contiguous(),
        to_volume=grid.to_volume @ old_from_new,
        to_world=grid.to_world @ old_from_new,
        spacing_mm=(i, j, k),
    )


def smooth_for(values: Voxels, spacing_mm: float, affine: Affine) -> Voxels:
    """Smooth a scan as for a grid of another spacing, but keep it at its own resolution.

    Args:
        values: Voxel values.
        spacing_mm: Of the grid, which may lie in any direction.
        affine: Of the scan.

    Returns:
        The scan with the point spread that ``app.preprocessing.resampling.resample`` would give it.
    """
    for axis, spacing in enumerate(spacing_of(affine)):
        step = float(spacing_mm / spacing)
        if step > 1.0:
            size = values.shape[axis]
            matrix = gaussians(np.arange(size), size, 0.5 * np.sqrt(step**2 - 1))
            values = apply_along(values, axis, matrix)
    return values


def index_grid(
    shape: Sequence[int], affine: Affine, device: torch.device | None = None
) -> Float[Tensor, "i j k 3"]:
    """List where each voxel of a grid lies in another."""
    axes = [torch.arange(n, dtype=torch.float32, device=device) for n in shape]
    matrix = torch.from_numpy(affine).float().to(device)
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return grid @ matrix[:3, :3].T + matrix[:3, 3]


def sample_at(
    voxels: Float[Tensor, "a b c"], index: Float[Tensor, "i j k 3"]
) -> Float[Tensor, "i j k"]:
    """Interpolate voxels linearly at fractional indices; outside the scan is 0."""
    size = torch.tensor(voxels.shape, dtype=torch.float32, device=index.device)
    unit = (2 * index + 1) / size - 1
    # grid_sample wants the fastest axis first, and on the host uses a thread per item of a batch.
    scans = voxels.expand(len(unit), 1, *voxels.shape)
    return functional.grid_sample(scans, unit.flip(-1)[:, None], align_corners=False)[:, 0, 0]


def _crop(
    volume: Volume, to_volume: Affine, shape: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    """Cut out the part of a scan that a grid needs, and say where it begins."""
    corners = np.stack(np.meshgrid(*[(0.0, n - 1.0) for n in shape], indexing="ij"), -1).reshape(
        -1, 3
    )
    reached = transform(to_volume, corners)
    margin = KERNEL_RADIUS_SIGMAS * 0.5 * step + 2
    size = np.array(volume.voxels.shape)
    first = np.clip(np.floor(reached.min(axis=0) - margin), 0, size - 1).astype(int)
    last = np.clip(np.ceil(reached.max(axis=0) + margin), first, size - 1).astype(int)
    part = tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True))
    return volume.voxels[part], first
