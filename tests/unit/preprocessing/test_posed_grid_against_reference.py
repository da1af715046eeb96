"""Scans in the pose of a subject, as a second network sees them, against plain NumPy in float64."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from app.io.volume import Volume
from app.model.sections import InputSpec
from app.preprocessing.posed_grid import Pose, make_posed_grid
from tests.support.oracle import Array
from tests.support.random_scans import ScanKind, make_random_scan

SEEDS = range(10)


def smooth(values: Array, sigmas: list[float]) -> Array:
    """Smooth by one dense matrix along each axis, cut 4 sigmas away; rows sum to 1 at ends, too."""
    for axis, sigma in enumerate(sigmas):
        if sigma > 0:
            apart = np.subtract.outer(*[np.arange(values.shape[axis])] * 2)
            rows = np.exp(-0.5 * (apart / sigma) ** 2) * (np.abs(apart) <= int(4 * sigma + 1))
            rows /= rows.sum(axis=1, keepdims=True)
            values = np.moveaxis(np.tensordot(rows, values, (1, axis)), 0, axis)
    return values


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


@pytest.mark.parametrize("kind", get_args(ScanKind))
def test_posed_grids_are_those_of_the_reference(kind: ScanKind) -> None:
    """In any pose and size, of scans that the tile reaches past, too."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        i, j, k = rng.uniform(0.5, 2.0, 3).tolist()
        scan = make_random_scan(kind, (i, j, k), rng)
        edges = rng.integers(8, 15, 3).tolist()
        keys = {"orientation": "RAS", "spacing_mm": (i, j, k), "tile_shape": tuple(edges)}
        window = {"method": "window", "lower": 0.0, "upper": 100.0}
        spec = InputSpec.model_validate({**keys, "intensity": window})
        scale, to_world = float(rng.uniform(0.5, 2.0)), np.eye(4)
        to_world[:3, :3] = scale * Rotation.from_rotvec(rng.normal(0, 2, 3)).as_matrix()
        middle = np.array(scan.voxels.shape) * rng.uniform(-0.1, 1.1, 3)
        to_world[:3, 3] = scan.affine[:3] @ np.append(middle, 1.0)
        low, high = rng.uniform(-10, 20), rng.uniform(50, 100)
        volume = Volume(scan.voxels.astype(np.float32), scan.affine)
        pose = Pose(to_world, scale)
        grid = make_posed_grid(volume, pose, spec, (low, high), torch.device("cpu"))

        voxels_mm = np.linalg.norm(scan.affine[:3, :3], axis=0)
        coarser = [scale * max(i, j, k) / mm for mm in voxels_mm]
        sigmas = [0.5 * math.sqrt(max(by**2 - 1, 0.0)) for by in coarser]
        fine = smooth(np.clip((scan.voxels - low) / (high - low), 0, 1), sigmas)
        centred = np.indices(tuple(edges)).reshape(3, -1).T - (np.array(edges) - 1) / 2
        world = (centred * (i, j, k)) @ to_world[:3, :3].T + to_world[:3, 3]
        index = np.linalg.solve(scan.affine[:3, :3], (world - scan.affine[:3, 3]).T).T
        expected = sample(fine, index).reshape(edges)
        assert np.abs(grid.voxels.numpy() - expected).max() < 1e-4, seed
        assert grid.spacing_mm == pytest.approx((scale * i, scale * j, scale * k))
        first = grid.to_world[:3, 3], scan.affine[:3] @ grid.to_volume[:, 3]
        np.testing.assert_allclose(first, [world[0]] * 2, atol=1e-6)
