"""Resampling as nnU-Net does it; ``tests/integration/test_nnunet.py`` compares it with nnU-Net."""

import sys

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from app.errors import ModelRefused
from app.geometry import transform
from app.preprocessing.splines import find_thick_axis, resample_as_nnunet

SHAPE = (13, 10, 17)
CLOSE = 1e-5
"""Of values of deviation 1: float32 against SciPy's float64."""


def make_noise() -> np.ndarray:
    return np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)


@pytest.mark.parametrize("layout", ["C", "F"])
@pytest.mark.parametrize(
    ("spacing", "target", "shape"),
    [
        ((1.0, 1.0, 1.0), (0.7, 1.0, 0.5), (19, 10, 34)),
        ((1.0, 1.0, 1.0), (1.9, 2.6, 1.4), (7, 4, 12)),
        ((0.3, 2.0, 2.0), (1.0, 1.0, 1.0), (4, 20, 34)),  # thick along two axes: along none
    ],
)
def test_volume_is_interpolated_by_cubic_splines(
    spacing: tuple[float, ...], target: tuple[float, ...], shape: tuple[int, ...], layout: str
) -> None:
    values = make_noise()
    factors = np.divide(shape, SHAPE)
    expected = zoom(values.astype(float), factors, order=3, mode="nearest", grid_mode=True)
    held = torch.from_numpy(np.array(values, order="F" if layout == "F" else "C"))
    found, _ = resample_as_nnunet(held, spacing, target)
    np.testing.assert_allclose(found, expected.clip(values.min(), values.max()), atol=CLOSE)


@pytest.mark.parametrize(
    ("spacing", "target", "slices"),
    [((5.0, 1.0, 1.0), (1.6, 1.3, 0.8), 41), ((1.0, 1.0, 1.0), (4.0, 1.3, 0.8), 3)],
)
def test_thick_slices_are_interpolated_each_and_the_nearest_is_taken(
    spacing: tuple[float, ...], target: tuple[float, ...], slices: int
) -> None:
    values = make_noise()
    plane = np.round(np.array(SHAPE[1:]) * spacing[1] / np.array(target[1:]))
    each = [
        zoom(one.astype(float), plane / SHAPE[1:], order=3, mode="nearest", grid_mode=True).clip(
            one.min(), one.max()
        )
        for one in values
    ]
    nearest = np.round((np.arange(slices) + 0.5) * SHAPE[0] / slices - 0.5).astype(int)
    found, _ = resample_as_nnunet(torch.from_numpy(values), spacing, target)
    np.testing.assert_allclose(found, np.stack(each)[nearest], atol=CLOSE)


def test_thick_axis_is_that_of_the_scan_before_that_of_the_grid() -> None:
    even, flat, rod = (1.0, 1.0, 1.0), (1.0, 3.1, 1.0), (3.1, 1.0, 3.1)
    assert find_thick_axis(even, even) is None
    assert find_thick_axis((1.0, 3.0, 1.0), even) is None
    assert find_thick_axis(flat, even) == 1
    assert find_thick_axis(even, flat) == 1
    assert find_thick_axis(rod, flat) is None


def test_faces_stay_where_they_are() -> None:
    _, old_from_new = resample_as_nnunet(torch.zeros(13, 10, 17), (1.0, 1.0, 1.0), (2.0, 0.7, 1.0))
    faces = np.array([[-0.5, -0.5, -0.5], [5.5, 13.5, 16.5]])
    np.testing.assert_allclose(
        transform(old_from_new, faces), [[-0.5, -0.5, -0.5], [12.5, 9.5, 16.5]]
    )


def test_scan_of_the_spacing_is_left_as_it_is() -> None:
    values = torch.from_numpy(make_noise())
    found, old_from_new = resample_as_nnunet(values.clone(), (2.0, 1.0, 1.5), (2.0, 1.0, 1.5))
    assert torch.equal(found, values)
    np.testing.assert_array_equal(old_from_new, np.eye(4))


def test_missing_scipy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    with pytest.raises(ModelRefused, match=r"pip install 'landmarkd\[nnunet\]'"):
        resample_as_nnunet(torch.zeros(4, 5, 6), (1.0, 1.0, 1.0), (2.0, 1.0, 1.0))
