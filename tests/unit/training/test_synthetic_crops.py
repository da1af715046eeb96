"""Scans with landmarks cut away."""

import numpy as np
import pytest

from app.geometry import transform
from app.io.volume import Volume
from app.training.calibrate.synthetic_crops import blanks, crop, halves
from tests.unit.preprocessing.test_grid import oblique_affine

SHAPE = (7, 10, 5)


def slope(shape: tuple[int, int, int]) -> Volume:
    """Make a scan whose values say where they are."""
    voxels = np.arange(np.prod(shape), dtype=np.float32).reshape(shape, order="F")
    return Volume(voxels, oblique_affine(3))


def world_of(volume: Volume, value: float) -> np.ndarray:
    return transform(volume.affine, np.argwhere(volume.voxels == value)[0].astype(np.float64))


def test_halves_partition_the_voxels_and_keep_their_positions() -> None:
    whole = slope(SHAPE)
    parts = halves(whole)
    assert [part.voxels.shape for part in parts] == [
        (3, 10, 5), (4, 10, 5), (7, 5, 5), (7, 5, 5), (7, 10, 2), (7, 10, 3),
    ]  # fmt: skip
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        values = np.concatenate([first.voxels.ravel(), second.voxels.ravel()])
        assert sorted(values) == sorted(whole.voxels.ravel())
    for part in parts:
        value = float(part.voxels[1, 1, 1])
        np.testing.assert_allclose(world_of(part, value), world_of(whole, value), atol=1e-12)


def test_a_crop_is_a_slab() -> None:
    whole = slope(SHAPE)
    part = crop(whole, 1, 2, 6)
    np.testing.assert_array_equal(part.voxels, whole.voxels[:, 2:6])


@pytest.mark.parametrize("shape", [(1, 4, 6), (2, 1, 3)])
def test_a_flat_scan_has_no_empty_half(shape: tuple[int, int, int]) -> None:
    assert all(part.voxels.size for part in halves(slope(shape)))


def test_a_flat_scan_is_no_half_of_itself() -> None:
    assert [part.voxels.shape for part in halves(slope((1, 4, 6)))] == [
        (1, 2, 6), (1, 2, 6), (1, 4, 3), (1, 4, 3),
    ]  # fmt: skip


def test_blank_scans_lie_where_the_scan_lies_and_show_nothing() -> None:
    whole = slope(SHAPE)
    empty, noise = blanks(whole)
    assert not empty.voxels.any()
    assert noise.voxels.std() > 10
    for blank in (empty, noise):
        assert blank.voxels.shape == SHAPE
        np.testing.assert_array_equal(blank.affine, whole.affine)
