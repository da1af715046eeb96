"""Landmarks -> pose of a subject -> the scan in that pose, in NumPy float64: part of the reference.

Written from ``models/README.md``, for what a second network sees.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.model.sections import InputSpec
from tests.support.oracle import Array
from tests.support.reference import ReferenceLandmark, ScanFrame
from tests.support.reference_grid import along, gaussians, stretch
from tests.support.reference_modes import Extent
from tests.support.reference_shape import choose_by_shape, fit_similarity


@dataclass(frozen=True, slots=True)
class ReferenceScan:
    """Voxels, (i j k), and the map of their indices to mm, RAS."""

    voxels: Array
    affine: Array


@dataclass(frozen=True, slots=True)
class ReferencePose:
    """Frame of a mean shape in mm -> mm, RAS, 4 x 4; and the landmarks that agree with it."""

    to_world: Array
    agree: list[int]

    @property
    def scale(self) -> float:
        """Size of the subject, in that of the mean shape."""
        return float(np.cbrt(np.linalg.det(self.to_world[:3, :3])))


def move(affine: Array, points: Array) -> Array:
    """Map points, (... 3)."""
    return np.asarray(points @ affine[:3, :3].T + affine[:3, 3])


def find_pose(
    landmarks: Sequence[ReferenceLandmark], mean: Array, tolerance_mm: float
) -> ReferencePose | None:
    """Fit a mean shape to the landmarks that agree with one fit of it."""
    places = [
        np.array([] if one.ras_mm is None else one.ras_mm).reshape(-1, 3) for one in landmarks
    ]
    sure = [
        np.array([] if one.ras_mm is None else [one.confidence], dtype=float) for one in landmarks
    ]
    chosen = [one.chosen for one in choose_by_shape(places, sure, mean, tolerance_mm)]
    agree = [row for row, one in enumerate(chosen) if one is not None]
    if not agree:
        return None
    points = np.array([places[row][0] for row in agree])
    return ReferencePose(fit_similarity(mean[agree], points, np.ones(len(agree))), agree)


def posed_grid(
    scan: ReferenceScan,
    shown: ReferenceScan,
    pose: Array,
    spec: InputSpec,
    window: tuple[float, float],
) -> tuple[Array, ScanFrame]:
    """Resample what is shown of a scan into a pose; gives the grid, and where it lies."""
    assert spec.tile_shape != "whole"
    edges, spacing = spec.tile_shape, np.array(spec.spacing_mm)
    scale = float(np.cbrt(np.linalg.det(pose[:3, :3])))
    from_grid = np.diag([*spacing, 1.0])
    from_grid[:3, 3] = -spacing * (np.array(edges) - 1) / 2
    to_world = pose @ from_grid
    voxels_mm = np.linalg.norm(shown.affine[:3, :3], axis=0)
    fine = stretch(shown.voxels, window)
    for axis, mm in enumerate(voxels_mm):
        coarser = scale * spacing.max() / mm
        sigma = 0.5 * math.sqrt(max(coarser**2 - 1, 0.0))
        fine = along(fine, gaussians(fine.shape[axis], sigma), axis)
    to_shown = np.linalg.inv(shown.affine) @ to_world
    index = move(to_shown, np.indices(edges, dtype=float).reshape(3, -1).T)
    frame = ScanFrame(
        edges,
        scale * spacing,
        np.linalg.inv(scan.affine) @ to_world,
        to_world,
        Extent(to_shown, shown.voxels.shape),
    )
    return sample(fine, index).reshape(edges), frame


def sample(values: Array, index: Array) -> Array:
    """Interpolate linearly at indices, (n 3), among zeros."""
    sampled, low = np.zeros(len(index)), np.floor(index).astype(int)
    for corner in itertools.product((0, 1), repeat=3):
        voxel = low + corner
        inside = np.all((voxel >= 0) & (voxel < values.shape), axis=1)
        share = np.prod(np.where(np.array(corner) == 1, index - low, 1 - index + low), axis=1)
        i, j, k = np.where(inside[:, None], voxel, 0).T
        sampled += inside * share * values[i, j, k]
    return sampled
