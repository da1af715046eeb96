"""A scan smoothed for a coarser grid, against products of matrices along each axis."""

import tracemalloc
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch

from app.preprocessing.resampling import apply_along, band_of, gaussians, resample
from app.preprocessing.smoothing import smooth_for

SPACING_MM = (0.5, 1.0, 2.5)
SIGMA_AT_2_MM = (0.5 * np.sqrt(15), 0.5 * np.sqrt(3), 0.0)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("threads", [1, 3])
def test_each_axis_is_smoothed_by_as_much_as_the_grid_is_coarser(
    order: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order in memory; the last axis, whose voxels are larger already, not at all."""
    monkeypatch.setattr("app.preprocessing.smoothing.PLANES_PER_THREAD", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    back = [order.index(axis) for axis in range(3)]
    values = torch.rand(14, 9, 11, generator=torch.Generator().manual_seed(1))
    values = values.permute(order).contiguous().permute(back)
    kept, expected = values.clone(), values
    for axis in (0, 1):
        size = values.shape[axis]
        _, kernels = gaussians(np.arange(size), size, SIGMA_AT_2_MM[axis])
        expected = apply_along(expected, axis, size, partial(band_of, kernels))
    smooth = smooth_for(values, 2.0, np.diag([*SPACING_MM, 1.0]))
    torch.testing.assert_close(smooth, expected, atol=1e-6, rtol=0)
    assert torch.equal(values, kept)


def test_a_window_is_applied_before_values_are_smoothed() -> None:
    """One voxel far above it counts as much as one at its upper bound."""
    values = torch.zeros(9, 9, 9)
    values[4, 4, 4] = 30.0
    bounded = smooth_for(values, 2.0, np.eye(4), (10.0, 20.0))
    values[4, 4, 4] = 20.0
    assert torch.equal(bounded, smooth_for(values, 2.0, np.eye(4), (10.0, 20.0)))
    assert 0.0 < float(bounded.max()) < 0.5


def test_a_scan_that_is_coarser_already_is_only_brought_to_the_window() -> None:
    values = torch.tensor([[[-1.0, 2.0, 3.0, 9.0]]])
    smooth = smooth_for(values, 0.5, np.eye(4), (1.0, 5.0))
    assert smooth.flatten().tolist() == [0.0, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("filtered", ["resample", "smooth"])
def test_a_long_axis_takes_no_matrix_of_its_square(filtered: str) -> None:
    values = torch.zeros(4096, 2, 2)
    tracemalloc.start()
    try:
        if filtered == "resample":
            resample(values, (1.1, 1.0, 1.0))
        else:
            smooth_for(values, 2.0, np.eye(4))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * values.nbytes
