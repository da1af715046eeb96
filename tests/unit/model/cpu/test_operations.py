"""On a CPU: small convolutions are fast, and a tile's output does not depend on its batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from app.model.cpu import CpuKernels, Head
from app.model.network import go_on

SMALL = (1, 3, 9, 11, 13)
KINDS = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (2, 1, 2), "padding": (1, 0, 2), "dilation": (1, 2, 1)},
    {"stride": [2], "padding": [1]},
    {"padding": "same"},
    {"groups": 3},
    {"bias": False},
]
TRANSPOSED_KINDS = [
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": (2, 1, 2), "padding": (1, 0, 2), "output_padding": (1, 0, 0)},
    {"stride": [2], "padding": [1], "output_padding": [1]},
    {"stride": 1, "dilation": 2, "output_padding": 1},
    {"groups": 3},
    {"bias": False},
]


def operations(module: nn.Module, tile: Tensor) -> set[str]:
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as run:
        module(tile)
    return {event.key for event in run.key_averages()}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_convolutions_are_those_of_torch(kind: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module, tile = nn.Conv3d(3, 6, 3, **kind), torch.randn(SMALL)
    with torch.inference_mode():
        expected = module(tile)
        with CpuKernels(go_on):
            torch.testing.assert_close(module(tile), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", TRANSPOSED_KINDS, ids=str)
@pytest.mark.parametrize("channels", [3, 6])
def test_transposed_convolutions_are_those_of_torch(channels: int, kind: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module, tile = nn.ConvTranspose3d(channels, 6, 3, **kind), torch.randn(1, channels, 5, 6, 7)
    with torch.inference_mode():
        expected = module(tile)
        with CpuKernels(go_on):
            torch.testing.assert_close(module(tile), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_batch_of_one_small_tile_is_computed_by_onednn() -> None:
    module, tile = nn.Conv3d(3, 6, 3), torch.randn(SMALL)
    assert "aten::slow_conv3d" in operations(module, tile), "torch does so itself by now"
    with CpuKernels(go_on):
        assert "aten::mkldnn_convolution" in operations(module, tile)


def test_other_types_and_keywords_are_left_alone() -> None:
    module, tile = nn.Conv3d(3, 6, 3).double(), torch.randn(SMALL).double()
    transposed, head = nn.ConvTranspose3d(3, 6, 2).double(), Head(nn.Conv3d(1, 1, 1), 1)
    with torch.inference_mode():
        expected = transposed(tile)
    with torch.inference_mode(), CpuKernels(go_on, head):
        torch.testing.assert_close(
            torch.conv3d(tile, weight=module.weight, bias=module.bias, padding=1),
            torch.nn.functional.conv3d(tile, module.weight, module.bias, 1, 1),
        )
        torch.testing.assert_close(transposed(tile), expected)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norm_of_a_tile_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    norm = nn.GroupNorm(2, 8).to(dtype)
    tiles = torch.randn(6, 8, 40, 32, 32, dtype=dtype).to(memory_format=torch.channels_last_3d)
    with torch.inference_mode():
        alone = torch.cat([norm(tile) for tile in tiles.split(1)])
        assert not torch.equal(norm(tiles), alone), "torch does so by now"
    with torch.inference_mode(), CpuKernels(go_on):
        alone = torch.cat([norm(tile) for tile in tiles.split(1)])
        for size in (2, 3, 6):
            together = torch.cat([norm(batch) for batch in tiles.split(size)])
            assert torch.equal(together, alone), size


@pytest.mark.parametrize(
    "layer",
    [nn.Conv3d(4, 8, 3), nn.ConvTranspose3d(4, 8, 2, 2), nn.ConvTranspose3d(4, 8, 3, 2, 1, 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edges", [(3, 3, 3), (9, 8, 7)], ids=str)
def test_convolution_of_a_tile_does_not_depend_on_its_batch(
    layer: nn.Module, dtype: torch.dtype, edges: tuple[int, int, int]
) -> None:
    torch.manual_seed(1)
    layer = layer.to(dtype)
    tiles = torch.randn(3, 4, *edges, dtype=dtype).to(memory_format=torch.channels_last_3d)
    with torch.inference_mode(), CpuKernels(go_on):
        assert torch.equal(torch.cat([layer(tile) for tile in tiles.split(1)]), layer(tiles))
