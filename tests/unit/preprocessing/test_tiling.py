"""Tile plans: they cover every voxel, and importances sum to one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import TooLarge
from app.model.sections import InputSpec, IntensitySpec
from app.preprocessing.tiling import (
    TilePlan,
    count_tiles,
    extract_tile,
    load_profiles,
    plan_tiles,
    tile_weights,
    within_grid,
)

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
    lowest = plan.origins.min(axis=0)
    size = (plan.origins.max(axis=0) - lowest + plan.tile_shape) // plan.stride
    total = np.zeros(size)
    for index in range(len(plan)):
        i, j, k = tile_weights(plan, index, load_profiles(plan, CPU))
        product = i[:, None, None] * j[:, None] * k
        a, b, c = (plan.origins[index] - lowest) // plan.stride
        total[a : a + len(i), b : b + len(j), c : c + len(k)] += product.numpy()
    return total


@pytest.mark.no_cover
@given(
    shape=st.tuples(*[st.integers(1, 90)] * 3),
    overlap=st.sampled_from([0.0, 0.25, 0.5, 0.8]),
    stride=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["even", "nnunet"]),
)
@settings(max_examples=60)
def test_importances_sum_to_one_at_every_voxel(
    shape: tuple[int, int, int], overlap: float, stride: int, layout: str
) -> None:
    stride = 1 if layout == "nnunet" else stride  # nnU-Net's networks have no other.
    spec = make_spec(tile_overlap=overlap, tile_layout=layout)
    plan = plan_tiles(shape, spec, stride)
    total = summed_importance(plan)
    assert all(n * stride >= size for n, size in zip(total.shape, shape, strict=True))
    np.testing.assert_allclose(total, 1, atol=1e-5)
    assert (plan.origins % stride == 0).all()
    assert count_tiles(shape, spec, stride) == (plan.tile_shape, len(plan))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", ["even", "nnunet", "monai"])
def test_voxels_within_the_grid_are_those_that_are_no_padding(layout: str, stride: int) -> None:
    plan = plan_tiles((11, 50, 32), make_spec(tile_layout=layout), stride)
    covered = torch.zeros(11, 50, 32)
    for index in range(len(plan)):
        spans = within_grid(plan, index)
        tile = extract_tile(torch.ones(11, 50, 32), plan, index)[0]
        inside = [slice(stride * span.start, stride * span.stop) for span in spans]
        first = plan.origins[index] + [span.start for span in inside]
        assert (first >= 0).all()
        assert tile[*inside].sum() == tile.sum()
        i, j, k = (
            slice(int(a), int(a) + s.stop - s.start) for a, s in zip(first, inside, strict=True)
        )
        covered[i, j, k] = 1
    assert covered.all()


def test_tiles_of_monai_lie_side_by_side_and_the_last_ends_with_the_grid() -> None:
    plan = plan_tiles((16, 24, 75), make_spec(tile_layout="monai"), stride=1)
    assert plan.origins[:, 2].tolist() == [0, 24, 43]
    for profile in plan.profiles[2]:
        assert profile[15:17] == pytest.approx([1, 1], abs=0.01)


def test_small_grids_are_padded_at_both_ends_as_by_nnunet_and_monai() -> None:
    for layout, first in (("even", 0), ("nnunet", 2), ("monai", 2)):
        plan = plan_tiles((11, 24, 32), make_spec(tile_layout=layout), stride=1)
        (tile,) = extract_tile(torch.ones(11, 24, 32), plan, 0)
        assert tile[:, 0, 0].tolist() == [0] * first + [1] * 11 + [0] * (5 - first)


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


def test_scan_that_is_too_large_by_its_padding_is_told_so() -> None:
    spec = make_spec(tile_shape="whole", divisor=16, max_voxels=2_000_000, spacing_mm=(0.42,) * 3)
    assert count_tiles((112, 112, 112), spec, stride=1)[1] == 1
    with pytest.raises(
        TooLarge, match=r"about 53 mm .*got one of 48 x 48 x 47 mm, .* 54 x 54 x 54 mm"
    ):
        count_tiles((115, 114, 113), spec, stride=1)


def test_a_tile_counts_most_in_its_middle_or_at_a_voxel_as_for_nnunet() -> None:
    """nnU-Net blurs a single voxel, whose index is half the edge."""
    nnunet = {"tile_overlap": 0.5, "tile_sigma": 0.125}
    for layout, middle in (("even", 7.5), ("monai", 7.5), ("nnunet", 8)):
        plan = plan_tiles((24, 24, 32), make_spec(tile_layout=layout, **nnunet), stride=1)
        first, second = plan.profiles[0]
        away = np.arange(16) - middle
        gaussian = np.exp(-(away**2) / (2 * 2.0**2))
        np.testing.assert_allclose(first[8:] / second[:8], gaussian[8:] / gaussian[:8])
