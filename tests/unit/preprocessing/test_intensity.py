"""Rules by which nnU-Net scales voxel values, besides those that ``test_grid`` tests."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from app.model import IntensitySpec
from app.preprocessing import normalise_

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
    "rule",
    [
        {"method": "clip", "lower": 0.0, "upper": 1.0, "mean": 0.5},
        {"method": "clip", "lower": 1.0, "upper": 0.0, "mean": 0.5, "deviation": 1.0},
        {"method": "clip", "lower": 0.0, "upper": 1.0, "mean": 0.5, "deviation": 0.0},
        {"method": "zscore", "mean": 0.5},
        {"method": "window", "region": "filled"},
    ],
)
def test_rule_that_makes_no_sense_is_refused(rule: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        IntensitySpec.model_validate(rule)
