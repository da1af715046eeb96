"""A batch of one: oneDNN computes it, too, and what it computes is the same."""

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from app.model.onednn import OneDnnConvolutions

SMALL = (1, 3, 9, 11, 13)
KINDS = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (2, 1, 2), "padding": (1, 0, 2), "dilation": (1, 2, 1)},
    {"padding": "same"},
    {"groups": 3},
    {"bias": False},
]


def operations(module: nn.Module, tile: Tensor) -> set[str]:
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as run:
        module(tile)
    return {event.key for event in run.key_averages()}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_convolutions_are_those_of_torch(kind: dict[str, object]) -> None:
    torch.manual_seed(1)
    module, tile = nn.Conv3d(3, 6, 3, **kind), torch.randn(SMALL)  # type: ignore[arg-type]
    with torch.inference_mode():
        expected = module(tile)
        with OneDnnConvolutions():
            torch.testing.assert_close(module(tile), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_batch_of_one_small_tile_is_computed_by_onednn() -> None:
    module, tile = nn.Conv3d(3, 6, 3), torch.randn(SMALL)
    assert "aten::slow_conv3d" in operations(module, tile), "torch does so itself by now"
    with OneDnnConvolutions():
        assert "aten::mkldnn_convolution" in operations(module, tile)


def test_other_types_and_keywords_are_left_alone() -> None:
    module, tile = nn.Conv3d(3, 6, 3).double(), torch.randn(SMALL).double()
    with torch.inference_mode(), OneDnnConvolutions():
        torch.testing.assert_close(
            torch.conv3d(tile, weight=module.weight, bias=module.bias, padding=1),
            torch.nn.functional.conv3d(tile, module.weight, module.bias, 1, 1),
        )
