"""Volume + Pose -> Grid: a scan resampled into the coordinate frame of a mean shape.

The first-stage network sees a whole scan in any pose and finds landmarks only to the accuracy of
its coarse grid. Together, though, the landmarks determine the pose of the subject much better than
each of them is known. Resampled into that pose, all subjects look nearly alike: a second network,
trained at a finer spacing on scans in this pose only, is several times more accurate.

The posed grid is a single tile with a fixed place in the frame of the second network's mean shape:
the origin of that frame is its centre. As the pose is a similarity, one millimetre of the frame is
``scale`` millimetres of the subject.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from nibabel.orientations import inv_ornt_aff
from torch import Tensor

from app.compute import HOST, upload_numbers
from app.geometry import Affine, corners, scaling, spacing_of, transform, translation
from app.io import Volume
from app.model import WHOLE, InputSpec
from app.preprocessing.grid import Grid, ScanExtent
from app.preprocessing.resampling import KERNEL_RADIUS_SIGMAS
from app.preprocessing.sampling import sample_at
from app.preprocessing.smoothing import smooth_for

VIEWS: Final = (
    ((1, 2, 0), (1, 1, 1)),
    ((0, 1, 2), (-1, -1, 1)),
    ((2, 0, 1), (-1, 1, -1)),
    ((0, 2, 1), (1, 1, -1)),
    ((2, 1, 0), (-1, 1, 1)),
)
"""Orientations to view a grid in besides its own: the permutation of its axes and the sign of each.
All are proper rotations, and any two differ by at least 90 degrees."""


@dataclass(frozen=True, slots=True)
class Pose:
    """Position, orientation and size of a subject.

    Attributes:
        to_world: Frame of the mean shape in mm -> mm, RAS: rotation, translation and scale.
        scale: Size of the subject relative to the mean shape.
    """

    to_world: Affine
    scale: float


def make_posed_grid(
    volume: Volume,
    pose: Pose,
    spec: InputSpec,
    window: tuple[float, float],
    device: torch.device,
    shown: Volume | None = None,
) -> Grid:
    """Resample a scan onto the grid of the second-stage network.

    Args:
        volume: The scan.
        pose: Of the subject in it.
        spec: Spacing and tile of the second-stage network; the tile is the grid.
        window: Voxel values that map to 0 and 1: those of the first-stage network's grid.
        device: Of the grid.
        shown: What ``trim`` leaves of the scan, if the model is to see it without its padding.

    Returns:
        The grid; its spacing is in mm of the subject. It is 0 outside the scan.
    """
    if spec.tile_shape == WHOLE:
        raise ValueError(
            "expected a second-stage network with a tile shape, got one for whole scans"
        )
    shape = np.array(spec.tile_shape)
    frame_from_grid = scaling(list(spec.spacing_mm)) @ translation(-(shape - 1) / 2)
    to_world = pose.to_world @ frame_from_grid
    to_volume = np.linalg.inv(volume.affine) @ to_world
    step = spacing_of(to_world) / spacing_of(volume.affine).min()
    shown = shown or volume
    to_shown = np.linalg.inv(shown.affine) @ to_world
    values, first = _view_needed(shown.voxels, to_shown, spec.tile_shape, float(step.max()))
    fine = smooth_for(values, pose.scale * max(spec.spacing_mm), volume.affine, device, window)
    voxels = sample_at(
        fine, index_grid(spec.tile_shape, translation((-first).tolist()) @ to_shown, device)
    )
    i, j, k = (pose.scale * mm for mm in spec.spacing_mm)
    scan = ScanExtent(to_shown, shown.voxels.shape)
    return Grid(voxels, to_volume, to_world, (i, j, k), window, scan)


def reorient_grid(grid: Grid, view: int) -> Grid:
    """Permute and flip the axes of a grid into one of ``VIEWS``; no voxel value changes."""
    return _reorient(grid, *VIEWS[view])


def turn_upside_down(grid: Grid, orientation: str) -> Grid:
    """Turn a grid by half a turn about its axis from back to front.

    Args:
        grid: The grid; no voxel value changes.
        orientation: Where its axes point to, as of ``InputSpec``.
    """
    i, j, k = (1 if letter in "PA" else -1 for letter in orientation)
    return _reorient(grid, (0, 1, 2), (i, j, k))


def _reorient(grid: Grid, order: tuple[int, int, int], signs: tuple[int, int, int]) -> Grid:
    """Permute the axes of a grid, and flip those whose sign is negative."""
    shown_by = np.argsort(order)  # The new axis that each old one becomes.
    turn = np.column_stack([shown_by, np.array(signs)[shown_by]])
    old_from_new = inv_ornt_aff(turn, grid.voxels.shape)
    flips = [axis for axis, sign in enumerate(signs) if sign < 0]
    i, j, k = (grid.spacing_mm[axis] for axis in order)
    return replace(
        grid,
        voxels=grid.voxels.permute(order).flip(flips).contiguous(),
        to_volume=grid.to_volume @ old_from_new,
        to_world=grid.to_world @ old_from_new,
        spacing_mm=(i, j, k),
    )


def index_grid(
    shape: Sequence[int], affine: Affine, device: torch.device = HOST.device
) -> Float[Tensor, "i j k 3"]:
    """Return the coordinates of each voxel of a grid in the index space of another."""
    columns = upload_numbers(affine[:3].T.copy(), device)
    i, j, k = (
        torch.arange(n, dtype=torch.float64, device=device)[:, None] * columns[axis]
        for axis, n in enumerate(shape)
    )
    i = i + columns[3]
    return i.float()[:, None, None] + (j[:, None] + k).float()


def _view_needed(
    voxels: np.ndarray, to_voxels: Affine, shape: Sequence[int], step: float
) -> tuple[np.ndarray, np.ndarray]:
    """View the part of a scan that a grid needs; gives also the index of its first voxel."""
    reached = transform(to_voxels, corners(shape))
    margin = KERNEL_RADIUS_SIGMAS * 0.5 * step + 2
    size = np.array(voxels.shape)
    first = np.clip(np.floor(reached.min(axis=0) - margin), 0, size - 1).astype(int)
    last = np.clip(np.ceil(reached.max(axis=0) + margin), first, size - 1).astype(int)
    part = tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True))
    return voxels[part], first
