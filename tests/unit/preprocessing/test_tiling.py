"""Tile plans: they cover every voxel, and importances sum to one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import TooLarge
from app.model.sections import InputSpec, IntensitySpec
from app.preprocessing.tiling import TilePlan, extract_tile, load_profiles, plan_tiles, tile_weights

CPU = torch.device("cpu")


def make_spec(**changes: object) -> InputSpec:
    return InputSpec.model_validate(
        {
            "orientation": "RAS",
            "spacing_mm": (1.0, 1.0, 1.0),
            "tile_shape": (16, 24, 32),
            "tile_overlap": 0.25,
            "intensity": IntensitySpec(method="none"),
        }
        | changes
    )


def summed_importance(plan: TilePlan) -> np.ndarray:
    size = (plan.origins.max(axis=0) + plan.tile_shape) // plan.stride
    total = np.zeros(size)
    for index in range(len(plan)):
        i, j, k = tile_weights(plan, index, load_profiles(plan, CPU))
        product = i[:, None, None] * j[:, None] * k
        a, b, c = plan.origins[index] // plan.stride
        total[a : a + len(i), b : b + len(j), c : c + len(k)] += product.numpy()
    return total


@given(
    shape=st.tuples(*[st.integers(1, 90)] * 3),
    overlap=st.sampled_from([0.0, 0.25, 0.5, 0.8]),
    stride=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=40)
def test_importances_sum_to_one_at_every_voxel(
    shape: tuple[int, int, int], overlap: float, stride: int
) -> None:
    plan = plan_tiles(shape, make_spec(tile_overlap=overlap), stride)
    total = summed_importance(plan)
    assert all(n * stride >= size for n, size in zip(total.shape, shape, strict=True))
    np.testing.assert_allclose(total, 1, atol=1e-5)
    assert (plan.origins % stride == 0).all()


def test_tiles_put_together_are_the_grid() -> None:
    voxels = torch.randn(37, 50, 41)
    plan = plan_tiles(voxels.shape, make_spec(), stride=1)
    together = torch.zeros(64, 80, 80)
    for index in range(len(plan)):
        i, j, k = plan.origins[index]
        together[i : i + 16, j : j + 24, k : k + 32] = extract_tile(voxels, plan, index)[0]
    torch.testing.assert_close(together[:37, :50, :41], voxels)
    assert together[37:].abs().max() == 0


def test_neighbouring_tiles_overlap_as_asked() -> None:
    plan = plan_tiles((64, 24, 32), make_spec(tile_overlap=0.25), stride=1)
    steps = np.diff(np.unique(plan.origins[:, 0]))
    assert (steps <= 12).all()


def test_small_grid_is_one_padded_tile() -> None:
    plan = plan_tiles((5, 6, 7), make_spec(), stride=2)
    assert len(plan) == 1
    tile = extract_tile(torch.ones(5, 6, 7), plan, 0)
    assert tile.shape == (1, 16, 24, 32)
    assert tile.sum() == 5 * 6 * 7


def test_whole_grid_is_padded_up_to_the_divisor() -> None:
    spec = make_spec(tile_shape="whole", divisor=16)
    plan = plan_tiles((60, 65, 7), spec, stride=2)
    assert plan.tile_shape == (64, 80, 16)
    assert len(plan) == 1
    np.testing.assert_allclose(summed_importance(plan), 1)


def test_whole_grid_over_its_limit_is_refused_with_both_sizes() -> None:
    spec = make_spec(tile_shape="whole", divisor=16, max_voxels=1000)
    with pytest.raises(TooLarge, match=r"at most .*1,000 voxels .* got one of \d+ x \d+ x \d+ mm"):
        plan_tiles((10, 16, 17), spec, stride=2)


def test_a_tile_counts_most_in_its_middle_or_at_a_voxel_as_for_nnunet() -> None:
    """nnU-Net blurs a single voxel, whose index is half the edge."""
    nnunet = {"tile_overlap": 0.5, "tile_sigma": 0.125}
    for centre, middle in (("middle", 7.5), ("voxel", 8)):
        plan = plan_tiles((24, 24, 32), make_spec(tile_centre=centre, **nnunet), stride=1)
        first, second = plan.profiles[0]
        away = np.arange(16) - middle
        gaussian = np.exp(-(away**2) / (2 * 2.0**2))
        np.testing.assert_allclose(first[8:] / second[:8], gaussian[8:] / gaussian[:8])
