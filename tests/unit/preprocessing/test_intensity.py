"""Rules by which nnU-Net scales voxel values, besides those that ``test_grid`` tests."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from app.model import IntensitySpec
from app.preprocessing import normalise_
from app.preprocessing.intensity import percentiles

BOX = (slice(2, 7), slice(1, 9), slice(3, 6))


@pytest.fixture
def values() -> Tensor:
    """A block of values in zeros, with a zero in it, and one at its corner."""
    generator = torch.Generator().manual_seed(3)
    values = torch.zeros(9, 11, 7)
    values[BOX] = 100 + 20 * torch.randn(5, 8, 3, generator=generator)
    values[4, 4, 4] = 0.0
    values[2, 1, 3] = 0.0
    return values


@pytest.mark.parametrize("region", ["nonzero", "filled"])
def test_zscore_of_a_region_leaves_the_rest_at_zero(values: Tensor, region: str) -> None:
    inside = torch.zeros(values.shape, dtype=torch.bool)
    inside[BOX] = True
    inside[4, 4, 4] = region == "filled"
    inside[2, 1, 3] = False
    found = normalise_(values.clone(), IntensitySpec(method="zscore", region=region))
    assert not found[~inside].any()
    chosen = values[inside]
    expected = (chosen - chosen.mean()) / chosen.std(correction=0)
    torch.testing.assert_close(found[inside], expected)


@pytest.mark.parametrize("region", ["nonzero", "filled"])
def test_zscore_of_a_scan_without_a_region_is_zero(region: str) -> None:
    rule = IntensitySpec(method="zscore", region=region)
    assert not normalise_(torch.zeros(4, 5, 6), rule).any()


def test_clipped_values_are_scaled_as_those_of_all_training_scans() -> None:
    rule = IntensitySpec(method="clip", lower=-100.0, upper=300.0, mean=50.0, deviation=25.0)
    values = torch.tensor([[[-1000.0, -100.0, 50.0, 75.0, 4000.0]]])
    found = normalise_(values.clone(), rule)
    torch.testing.assert_close(found, torch.tensor([[[-6.0, -6.0, 0.0, 1.0, 10.0]]]))


@pytest.mark.parametrize(
    "table", [{"method": "zscore"}, {"method": "percentile", "lower": 0.0, "upper": 1.0}]
)
def test_values_in_a_small_unit_are_scaled_as_in_any_other(table: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(4)
    values = 1.0 + 0.3 * torch.randn(9, 11, 7, generator=generator)
    rule = IntensitySpec.model_validate(table)
    expected = normalise_(values.clone(), rule)
    torch.testing.assert_close(normalise_(values * 1e-9, rule), expected, rtol=1e-4, atol=1e-4)
    assert not normalise_(torch.full_like(values, 1e-9), rule).any()


@pytest.mark.parametrize("shape", [(1024, 1024, 3), (512, 512, 12), (160, 160, 100)])
def test_percentiles_of_large_grids_are_those_of_all_slices(shape: tuple[int, int, int]) -> None:
    values = torch.zeros(shape) + torch.arange(float(shape[2]))
    found = percentiles(values, 1.0, 95.0)
    expected = np.percentile(np.arange(shape[2]).repeat(100), [1.0, 95.0])
    np.testing.assert_allclose(found, expected, atol=1.0)


def test_percentiles_of_0_and_100_are_the_extremes_of_all_voxels() -> None:
    values = torch.zeros(200, 200, 200)
    values[3, 5, 7], values[4, 4, 4] = -5.0, 9.0
    assert percentiles(values, 0.0, 100.0) == (-5.0, 9.0)


@pytest.mark.parametrize(
    "rule",
    [
        {"method": "clip", "lower": 0.0, "upper": 1.0, "mean": 0.5},
        {"method": "clip", "lower": 1.0, "upper": 0.0, "mean": 0.5, "deviation": 1.0},
        {"method": "clip", "lower": 0.0, "upper": 1.0, "mean": 0.5, "deviation": 0.0},
        {"method": "zscore", "mean": 0.5},
        {"method": "window", "lower": 0.0, "upper": 1.0, "region": "filled"},
    ],
)
def test_rule_that_makes_no_sense_is_refused(rule: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        IntensitySpec.model_validate(rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"method": "percentile"}, "expected lower, upper with 'percentile'"),
        ({"method": "percentile", "upper": 99.5}, "expected lower, upper with 'percentile'"),
        ({"method": "window", "lower": 0.0}, "expected lower, upper with 'window'"),
        ({"method": "clip", "mean": 90.0, "deviation": 180.0}, "expected lower, upper, mean,"),
        ({"method": "zscore", "lower": 0.5, "upper": 99.5}, "expected no lower, upper with"),
        ({"method": "none", "upper": 400.0}, "expected no upper with 'none'"),
    ],
)
def test_bounds_that_nobody_chose_or_uses_are_refused(
    rule: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        IntensitySpec.model_validate(rule)
