"""Votes -> Heatmaps."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadParameter
from app.voting.heatmaps import aggregate
from app.voting.readout import Readout
from app.voting.votes import Votes, concat_votes, filter_votes
from tests.support import oracle
from tests.support.synthetic import random_field, shuffled, votes_at

SHAPE = (9, 11, 13)
READOUT = Readout(3, SHAPE, (0.5, 0.75, 1.25), radius_mm=3.0)


def noise(seed: int = 0) -> Votes:
    """Make votes everywhere, some of them outside the grid."""
    return filter_votes(random_field(SHAPE, 3, "softmax", seed), 0.3)


def dense(votes: Votes, shape: tuple[int, ...]) -> np.ndarray:
    """Sum votes by the oracle."""
    return oracle.heatmaps(
        votes.landmark.numpy(),
        votes.position.double().numpy(),
        votes.weight.double().numpy(),
        (3, *shape),
    )


def test_unsmoothed_heatmaps_are_the_oracles_sum() -> None:
    """Votes outside the grid are left out, not clamped to its border."""
    votes = noise()
    heatmap = aggregate(votes, range(3), READOUT).numpy()
    np.testing.assert_allclose(heatmap, dense(votes, SHAPE), atol=1e-5)
    assert heatmap.sum() < votes.weight.sum() - 1


@given(seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_the_order_of_votes_changes_no_bit(seed: int) -> None:
    """Fixed-point sums commute."""
    votes = noise()
    again = shuffled(votes, seed)
    assert torch.equal(
        aggregate(votes, [0, 2], READOUT, 0.6), aggregate(again, [0, 2], READOUT, 0.6)
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_and_the_choice_of_landmarks_change_no_bit(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes for landmarks that are not chosen, and ones outside the grid, are left out."""
    votes = noise()
    expected = aggregate(votes, range(3), READOUT)
    monkeypatch.setattr("app.voting.heatmaps.VOTES_PER_THREAD", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    assert torch.equal(aggregate(votes, [2, 1], READOUT), expected[[2, 1]])


def test_positions_on_a_half_round_up() -> None:
    """floor(v + 0.5): -0.5 is the first voxel, 8.5 is past the last of nine."""
    largest = float(np.nextafter(np.float32(0.5), np.float32(0)))
    votes = votes_at([[-0.5, 0, 0], [0.5, 0, 0], [largest, 0, 0], [8.5, 0, 0], [-0.5000001, 0, 0]])
    heatmap = aggregate(votes, [0], READOUT)[0]
    assert heatmap[:2, 0, 0].tolist() == [2, 1]
    assert heatmap.sum() == 3


def test_all_votes_in_one_voxel_do_not_overflow() -> None:
    """Three million unit votes: far past the 2,048 at which int32 would, with 2^20 per unit."""
    one = votes_at([[4.0, 5.0, 6.0]])
    votes = Votes(one.landmark.expand(3_000_000), one.columns.expand(8, 3_000_000))
    heatmap = aggregate(votes, [0], READOUT)[0]
    assert heatmap[4, 5, 6] == heatmap.sum() == 3_000_000


def test_aggregate_is_the_smoothed_sum_of_the_chosen_landmarks() -> None:
    """In mm: the grid is anisotropic, the Gaussian in voxels is not round."""
    votes = noise()
    volume = aggregate(votes, [2, 0], READOUT, smooth_mm=0.6)
    sigmas = (0.6 / 0.5, 0.6 / 0.75, 0.6 / 1.25)
    expected = dense(votes, SHAPE)
    assert volume.shape == (2, *SHAPE)
    for row, landmark in enumerate([2, 0]):
        smoothed = oracle.smooth(expected[landmark], sigmas)
        np.testing.assert_allclose(volume[row].numpy(), smoothed, atol=1e-5)


def test_a_gaussian_past_the_ends_of_a_short_axis_is_lost_as_past_those_of_a_long_one() -> None:
    """What it has beyond was added to what it has within: a slice was not smoothed at all."""
    slab = replace(READOUT, shape=(1, 2, 9))
    votes = votes_at([[0, 1, 4]])
    expected = oracle.smooth(dense(votes, slab.shape)[0], (1.2 / 0.5, 1.2 / 0.75, 1.2 / 1.25))
    volume = aggregate(votes, [0], slab, smooth_mm=1.2)[0]
    np.testing.assert_allclose(volume.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("smooth_mm", [5e-324, 1e-300, 1e-160, 1e-9])
def test_a_gaussian_that_reaches_no_other_voxel_changes_no_bit(smooth_mm: float) -> None:
    """Squares of distances in such sigmas ended in an OverflowError: the service answered 500."""
    votes = noise()
    narrow = aggregate(votes, range(3), READOUT, smooth_mm)
    assert torch.equal(narrow, aggregate(votes, range(3), READOUT))


def test_a_gaussian_as_wide_as_floats_can_say_is_flat() -> None:
    widest = aggregate(noise(), [0], READOUT, smooth_mm=1e308)
    assert torch.isfinite(widest).all()


def test_no_votes_make_an_empty_heatmap() -> None:
    """Zeros, not an error."""
    assert not aggregate(concat_votes([]), [1], READOUT).any()


@pytest.mark.parametrize(
    ("landmarks", "readout", "smooth_mm", "said"),
    [
        (range(2), replace(READOUT, landmarks=2), 0.0, "expected votes for 2 landmarks, .* for 3"),
        (range(4), READOUT, 0.0, r"landmarks: expected numbers from 0 to 2, .* \[0, 1, 2, 3\]"),
        ([-1], READOUT, 0.0, r"landmarks: .* got \[-1\]"),
        ([1, 1], READOUT, 0.0, r"landmarks: .* each once, got \[1, 1\]"),
        ([0], READOUT, -1.0, "smooth_mm: expected a length in mm, 0 or more .* got -1.0"),
        ([0], READOUT, math.nan, "smooth_mm: .* got nan"),
    ],
)
def test_heatmaps_of_what_is_not_there_are_refused(
    landmarks: Sequence[int], readout: Readout, smooth_mm: float, said: str
) -> None:
    """Of a landmark listed twice one heatmap was empty, and -1 was the last one."""
    with pytest.raises(BadParameter, match=said):
        aggregate(noise(), landmarks, readout, smooth_mm)
