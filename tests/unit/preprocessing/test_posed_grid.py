"""Scans resampled into the pose of their subject."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from app.geometry import Affine, Points, transform, translation
from app.io.volume import Volume
from app.model.sections import InputSpec, IntensitySpec
from app.preprocessing.grid import Grid, trim
from app.preprocessing.posed_grid import (
    VIEWS,
    Pose,
    make_posed_grid,
    reorient_grid,
    turn_upside_down,
)
from app.preprocessing.resampling import resample
from app.preprocessing.sampling import sample_at
from app.preprocessing.smoothing import smooth_for
from tests.unit.preprocessing.test_grid import (
    make_volume,
    oblique_affine,
    padded,
    with_zeros,
)

SPEC = InputSpec(
    orientation="RAS",
    spacing_mm=(1.5, 1.5, 1.5),
    tile_shape=(24, 16, 20),
    intensity=IntensitySpec(method="window", lower=0.0, upper=1.0),
)
CPU = torch.device("cpu")


def indices(shape: Sequence[int]) -> Points:
    """List the index of every voxel."""
    return np.stack(np.meshgrid(*[np.arange(float(n)) for n in shape], indexing="ij"), axis=-1)


def make_pose(seed: int, scale: float = 0.9) -> Pose:
    """Make a pose around the middle of a scan of ``blob_scan``."""
    rotation = Rotation.random(random_state=np.random.default_rng(seed)).as_matrix()
    to_world = np.eye(4)
    to_world[:3, :3] = scale * rotation
    to_world[:3, 3] = transform(oblique_affine(3), np.array([20.0, 22.0, 18.0]))
    return Pose(to_world, scale)


def blob_scan(place: Points, affine: Affine) -> Volume:
    """Make a scan of one Gaussian blob, 2.5 mm wide, at a place in mm."""
    shape = (41, 47, 38)
    index = indices(shape)
    away = np.linalg.norm(transform(affine, index) - place, axis=-1)
    return Volume(np.exp(-0.5 * (away / 2.5) ** 2).astype(np.float32), affine)


@pytest.mark.parametrize("seed", range(4))
def test_a_posed_grid_shows_a_place_where_its_affine_says(seed: int) -> None:
    """Scans with oblique axes and anisotropic spacing; the subject at nine tenths of its size."""
    pose = make_pose(seed)
    place = transform(pose.to_world, np.array([2.0, -1.0, 1.5]))
    volume = blob_scan(place, oblique_affine(3))
    grid = make_posed_grid(volume, pose, SPEC, (0.0, 1.0), CPU)
    assert tuple(grid.voxels.shape) == SPEC.tile_shape
    np.testing.assert_allclose(grid.spacing_mm, [1.35] * 3)
    weight = grid.voxels.numpy().astype(float)
    index = indices(weight.shape)
    middle = (weight[..., None] * index).sum((0, 1, 2)) / weight.sum()
    np.testing.assert_allclose(
        middle, np.array([2.0, -1.0, 1.5]) / 1.5 + (11.5, 7.5, 9.5), atol=0.1
    )
    np.testing.assert_allclose(transform(grid.to_world, middle), place, atol=0.15)
    in_scan = transform(np.linalg.inv(volume.affine), place)
    np.testing.assert_allclose(transform(grid.to_volume, middle), in_scan, atol=0.15)


def test_a_window_makes_its_bounds_zero_and_one() -> None:
    """Values of the scan, not of the part that is seen."""
    pose = make_pose(1)
    volume = blob_scan(pose.to_world[:3, 3], oblique_affine(3))
    grid = make_posed_grid(volume, pose, SPEC, (0.25, 0.5), CPU)
    assert float(grid.voxels.min()) == 0.0
    assert float(grid.voxels.max()) > 0.95


def test_only_the_part_of_a_scan_that_is_seen_is_read_and_that_changes_nothing() -> None:
    """Against the whole scan, smoothed and sampled; outside of it is 0."""
    pose = make_pose(2)
    random = np.random.default_rng(5)
    affine = oblique_affine(3)
    voxels = random.random((60, 70, 50)).astype(np.float32)
    grid = make_posed_grid(Volume(voxels, affine), pose, SPEC, (0.0, 1.0), CPU)
    smooth = smooth_for(voxels, 1.35, affine, CPU)
    index = indices(grid.voxels.shape)
    where = torch.from_numpy(transform(grid.to_volume, index)).float()
    np.testing.assert_allclose(grid.voxels.numpy(), sample_at(smooth, where).numpy(), atol=2e-4)
    far = Pose(pose.to_world + np.pad([[1e4]] * 3, ((0, 1), (3, 0))), pose.scale)
    seen = make_posed_grid(Volume(voxels, affine), far, SPEC, (0.0, 1.0), CPU)
    assert not seen.voxels.any()


def test_a_scan_ends_where_its_padding_begins() -> None:
    volume = make_volume(with_zeros((22, 17, 19)), oblique_affine(5))
    wide = padded(volume, ((20, 14), (9, 17), (12, 12)), 0.0)
    pose = Pose(volume.affine @ translation((20.0, 8.0, 9.0)), 1.0)
    plain = make_posed_grid(volume, pose, SPEC, (0.0, 200.0), CPU)
    grid = make_posed_grid(wide, pose, SPEC, (0.0, 200.0), CPU, trim(wide))
    assert torch.equal(grid.voxels, plain.voxels)
    assert grid.scan is not None
    assert plain.scan is not None
    index = indices(grid.voxels.shape)
    in_volume = transform(plain.to_volume, index)
    np.testing.assert_allclose(transform(grid.to_volume, index), in_volume + np.array([20, 9, 12]))
    inside = grid.scan.contains(index)
    np.testing.assert_array_equal(inside, plain.scan.contains(index))
    assert 0 < inside.sum() < inside.size


@pytest.mark.parametrize("window", [None, (0.0, 1.0)])
def test_smoothing_is_that_of_resampling(window: tuple[float, float] | None) -> None:
    """At the places of a grid along the same axes, both read the same values."""
    voxels = np.random.default_rng(1).random((30, 34, 38))
    coarse, old_from_new = resample(voxels, [2.0, 2.0, 2.0], CPU)
    smooth = smooth_for(voxels, 2.0, np.eye(4), CPU, window)
    index = indices(coarse.shape)
    where = torch.from_numpy(transform(old_from_new, index)).float()
    np.testing.assert_allclose(sample_at(smooth, where).numpy(), coarse.numpy(), atol=1.5e-5)


@pytest.mark.parametrize("orientation", ["RAS", "LPS", "SAL", "PIR"])
def test_what_is_upside_down_has_its_front_in_front_and_left_and_right_exchanged(
    orientation: str,
) -> None:
    """Every voxel keeps its value and its place."""
    voxels = torch.arange(3.0 * 4 * 5).reshape(3, 4, 5)
    grid = Grid(voxels, np.eye(4), oblique_affine(2), (0.5, 0.75, 1.25))
    turned = turn_upside_down(grid, orientation)
    axis = next(i for i, letter in enumerate(orientation) if letter in "PA")
    others = [i for i in range(3) if i != axis]
    torch.testing.assert_close(turned.voxels, voxels.flip(others))
    old = transform(turned.to_volume, indices((3, 4, 5)))
    np.testing.assert_allclose(old[..., axis], indices((3, 4, 5))[..., axis])
    for i in others:
        np.testing.assert_allclose(old[..., i], (voxels.shape[i] - 1) - indices((3, 4, 5))[..., i])
    np.testing.assert_allclose(turned.to_world, grid.to_world @ turned.to_volume)


@pytest.mark.parametrize("view", range(len(VIEWS)))
def test_a_grid_in_another_orientation_is_the_same_grid(view: int) -> None:
    """Every voxel keeps its value and its place, and no orientation is a mirror image."""
    voxels = torch.arange(3.0 * 4 * 5).reshape(3, 4, 5)
    grid = Grid(voxels, translation((1.0, 0, 2)), oblique_affine(2), (0.5, 0.75, 1.25))
    rotated = reorient_grid(grid, view)
    order = rotated.voxels.flatten().argsort().numpy()
    index = indices(rotated.voxels.shape).reshape(-1, 3)[order]
    old = indices((3, 4, 5)).reshape(-1, 3)
    np.testing.assert_allclose(transform(rotated.to_world, index), transform(grid.to_world, old))
    np.testing.assert_allclose(transform(rotated.to_volume, index), transform(grid.to_volume, old))
    rotation = np.linalg.inv(grid.to_world) @ rotated.to_world
    assert np.linalg.det(rotation) == pytest.approx(1.0)
    assert not np.allclose(rotation[:3, :3], np.eye(3))
    places = [grid.spacing_mm[axis] for axis in np.abs(rotation[:3, :3]).argmax(axis=0)]
    assert list(rotated.spacing_mm) == places
