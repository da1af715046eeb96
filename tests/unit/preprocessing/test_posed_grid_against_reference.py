"""Scans in the pose of a subject, as a second network sees them, against plain NumPy in float64."""

from typing import get_args

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from app.io.volume import Volume
from app.model.sections import InputSpec
from app.preprocessing.posed_grid import Pose, make_posed_grid
from tests.support.random_scans import ScanKind, make_random_scan
from tests.support.reference_pose import ReferenceScan, posed_grid

SEEDS = range(10)


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

        plain = ReferenceScan(scan.voxels, scan.affine)
        expected, frame = posed_grid(plain, plain, to_world, spec, (low, high))
        assert np.abs(grid.voxels.numpy() - expected).max() < 1e-4, seed
        assert grid.spacing_mm == pytest.approx((scale * i, scale * j, scale * k))
        np.testing.assert_allclose(grid.to_world, frame.to_world, atol=1e-6)
        np.testing.assert_allclose(grid.to_volume, frame.to_volume, atol=1e-6)
