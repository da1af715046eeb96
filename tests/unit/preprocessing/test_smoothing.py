"""A scan smoothed for a coarser grid, against products of matrices along each axis."""

import tracemalloc
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from app.preprocessing.cpu.sampling import UINT16_ONE
from app.preprocessing.resampling import apply_along, gaussian_taps, resample
from app.preprocessing.smoothing import smooth, smooth_for

CPU = torch.device("cpu")
SPACING_MM = (0.5, 1.0, 2.5)
SIGMA_AT_2_MM = (0.5 * np.sqrt(15), 0.5 * np.sqrt(3), 0.0)


def peak_bytes(run: Callable[[np.ndarray], object], voxels: np.ndarray) -> int:
    """Measure what a filter takes once it is compiled, as compiling takes memory, too."""
    run(voxels)
    tracemalloc.start()
    try:
        run(voxels)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("threads", [1, 3])
def test_each_axis_is_smoothed_by_as_much_as_the_grid_is_coarser(
    order: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order in memory; the last axis, whose voxels are larger already, not at all."""
    monkeypatch.setattr("app.preprocessing.cpu.slabs.SLAB_VOXELS", 3 * 9 * 11)
    monkeypatch.setattr("app.preprocessing.cpu.smoothing.PLANES_PER_THREAD", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    voxels = np.random.default_rng(1).random((14, 9, 11)).astype(np.float32)
    voxels = np.ascontiguousarray(voxels.transpose(order)).transpose(np.argsort(order))[:, ::-1]
    kept, expected = voxels.copy(), torch.from_numpy(voxels.copy())
    for axis in (0, 1):
        size = voxels.shape[axis]
        matrix = gaussian_taps(np.arange(size), size, SIGMA_AT_2_MM[axis])
        expected = apply_along(expected, axis, matrix)
    for window, unit in ((None, 1), ((0.0, 1.0), UINT16_ONE)):
        smooth = smooth_for(voxels, 2.0, np.diag([*SPACING_MM, 1.0]), CPU, window)
        torch.testing.assert_close(smooth.float() / unit, expected, atol=1e-5, rtol=0)
    assert np.array_equal(voxels, kept)


def test_a_window_is_applied_before_values_are_smoothed() -> None:
    """One voxel far above it counts as much as one at its upper bound."""
    voxels = np.zeros((9, 9, 9))
    voxels[4, 4, 4] = 30.0
    bounded = smooth_for(voxels, 2.0, np.eye(4), CPU, (10.0, 20.0))
    voxels[4, 4, 4] = 20.0
    assert torch.equal(bounded, smooth_for(voxels, 2.0, np.eye(4), CPU, (10.0, 20.0)))
    assert 0.0 < float(bounded.float().max()) < 0.5 * UINT16_ONE


def test_a_scan_that_is_coarser_already_is_only_brought_to_the_window() -> None:
    voxels = np.array([[[-1.0, 2.0, 3.0, 9.0]]])
    smooth = smooth_for(voxels, 0.5, np.eye(4), CPU, (1.0, 5.0))
    assert smooth.flatten().tolist() == [0, 16250, 32500, UINT16_ONE]


def test_a_scan_of_ones_stays_ones_however_wide_the_filter() -> None:
    """In two bytes, a little more would be a little more than nothing."""
    smooth = smooth_for(np.ones((80, 70, 60)), 40.0, np.eye(4), CPU, (0.0, 1.0)).float()
    assert (smooth / UINT16_ONE - 1).abs().max() < 1e-4


@pytest.mark.parametrize("filtered", ["resample", "smooth"])
def test_a_long_axis_takes_no_matrix_of_its_square(filtered: str) -> None:
    voxels = np.zeros((4096, 2, 2), np.float32)

    def run(some: np.ndarray) -> object:
        if filtered == "resample":
            return resample(some, (1.1, 1.0, 1.0), CPU)
        return smooth_for(some, 2.0, np.eye(4), CPU)

    assert peak_bytes(run, voxels) < 64 * voxels.nbytes


def test_a_thin_slab_takes_no_planes_that_it_does_not_have() -> None:
    """However wide the filter: three planes have two neighbours on a side at most."""
    voxels = np.random.default_rng(2).random((3, 128, 128)).astype(np.float32)

    def run(some: np.ndarray) -> torch.Tensor:
        return smooth_for(some, 40.0, np.eye(4), CPU)

    # Three of the result, a ring of five, and one with its margins.
    assert peak_bytes(run, voxels) < 16 * voxels[0].nbytes
    expected = torch.from_numpy(voxels)
    for axis, size in enumerate(voxels.shape):
        sigma = 0.5 * np.sqrt(40.0**2 - 1)
        expected = apply_along(expected, axis, gaussian_taps(np.arange(size), size, sigma))
    torch.testing.assert_close(run(voxels), expected, atol=1e-5, rtol=0)


def test_smoothed_volume_is_that_of_scipy() -> None:
    image = torch.rand(30, 28, 26, generator=torch.Generator().manual_seed(1))
    widths = np.array([0.0, 1.5, 0.7])
    inner = (slice(8, -8),) * 3
    expected = gaussian_filter(image.numpy(), widths, truncate=6.0)
    np.testing.assert_allclose(
        smooth(image, widths.tolist()).numpy()[inner], expected[inner], atol=1e-5
    )


def test_constant_volume_stays_so_when_it_is_smoothed() -> None:
    constant = torch.full((8, 8, 8), 0.5)
    torch.testing.assert_close(smooth(constant, [2.0, 0.0, 1.0]), constant)
