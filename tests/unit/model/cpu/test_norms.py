"""Compiled norms: exact to the type, and the same for any number of threads and of tiles."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from app.model.cpu.norms import can_norm, norm_groups
from app.model.cpu.operations import CpuKernels
from app.model.network import go_on

SHAPES = [(9, 11, 13), (8, 8, 8), (40, 32, 32), (1, 1, 2)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Put back how many threads there were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tiles_of(dtype: torch.dtype, shape: tuple[int, ...], count: int = 1) -> torch.Tensor:
    torch.manual_seed(1)
    tiles = torch.randn(count, 12, *shape) * 3 + 1
    return tiles.to(dtype, memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", [1, 4, 12])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2.0**-8)], ids=str
)
def test_norms_are_as_exact_as_their_type(
    dtype: torch.dtype, tolerance: float, groups: int, affine: bool, shape: tuple[int, ...]
) -> None:
    norm = nn.GroupNorm(groups, 12, affine=affine).double()
    if affine:
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.bias)
    norm = norm.to(dtype).double()
    tile = tiles_of(dtype, shape)
    expected = norm(tile.double())
    with torch.inference_mode(), CpuKernels(go_on):
        normed = norm.to(dtype)(tile)
    assert normed.dtype == dtype
    assert normed.stride() == tile.stride()
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 12), nn.InstanceNorm3d(12, affine=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_threads_nor_the_batch_change_a_bit(
    norm: nn.Module, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of this tile are of several sizes."""
    monkeypatch.setattr("app.model.cpu.norms.PARTS_PER_THREAD", 1)
    norm, tiles = norm.to(dtype), tiles_of(dtype, (40, 33, 31), count=6)
    with torch.inference_mode(), CpuKernels(go_on):
        torch.set_num_threads(1)
        expected = torch.cat([norm(tile) for tile in tiles.split(1)])
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            assert torch.equal(norm(tiles), expected), count


def test_instance_norm_is_that_of_torch() -> None:
    norm, tiles = nn.InstanceNorm3d(12, affine=True), tiles_of(torch.float32, (8, 11, 13), count=2)
    nn.init.uniform_(norm.weight)
    expected = norm(tiles)
    with torch.inference_mode(), CpuKernels(go_on):
        for layout in (tiles, tiles.contiguous()):
            torch.testing.assert_close(norm(layout), expected, rtol=1e-5, atol=1e-5)


def test_instance_norm_of_learned_statistics_is_left_to_torch() -> None:
    norm = nn.InstanceNorm3d(12, track_running_stats=True).eval()
    tiles = tiles_of(torch.float32, (9, 11, 13))
    with torch.inference_mode(), CpuKernels(go_on):
        torch.testing.assert_close(norm(tiles), tiles, rtol=1e-4, atol=1e-4)


def test_constant_tile_becomes_its_bias_and_nan_stays_nan() -> None:
    tile = torch.full((1, 12, 8, 8, 8), 7.3).to(memory_format=torch.channels_last_3d)
    for dtype in (torch.float32, torch.bfloat16):
        normed = norm_groups(tile.to(dtype), 4, None, torch.ones(12), 1e-5)
        torch.testing.assert_close(normed.float(), torch.ones_like(tile), atol=0.02, rtol=0)
        assert norm_groups(tile.to(dtype) * torch.nan, 4, None, None, 1e-5).isnan().all()


def test_other_layouts_and_types_are_left_to_torch() -> None:
    tile = tiles_of(torch.float32, (8, 8, 8))
    assert can_norm(tile)
    assert not can_norm(tile.contiguous())
    assert not can_norm(tile.double())
    assert not can_norm(tile[0])
