"""Votes -> Heatmaps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.voting.heatmaps import (
    add_votes,
    aggregate,
    nearest_voxel,
    sum_by_torch,
    sum_compiled,
)
from app.voting.readout import Readout
from app.voting.reference import FIXED_ONE
from app.voting.votes import Votes, empty_votes, filter_votes
from tests.support import oracle
from tests.support.synthetic import random_field, shuffled

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
@settings(max_examples=10, deadline=None)
def test_the_order_of_votes_changes_no_bit(seed: int) -> None:
    """Fixed-point sums commute."""
    votes = noise()
    again = shuffled(votes, seed)
    assert torch.equal(
        aggregate(votes, [0, 2], READOUT, 0.6), aggregate(again, [0, 2], READOUT, 0.6)
    )


def test_groups_of_landmarks_are_counted_like_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the counters of all do not fit, one landmark after the other gives the same bits."""
    votes = noise()
    expected = sum_by_torch(votes, votes.landmark, (3, *SHAPE))
    monkeypatch.setattr("app.voting.heatmaps.COUNTER_BYTES", 1)
    assert torch.equal(sum_by_torch(votes, votes.landmark, (3, *SHAPE)), expected)


@pytest.mark.parametrize("threads", [1, 4])
def test_compiled_sums_have_the_bits_of_the_plain_ones(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes for landmarks that are not chosen, and ones outside the grid, are left out by both."""
    monkeypatch.setattr("app.voting.heatmaps.VOTES_PER_THREAD", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    votes = noise()
    which = votes.landmark - 1
    shape = (2, *SHAPE)
    assert torch.equal(sum_compiled(votes, which, shape), sum_by_torch(votes, which, shape))


def test_positions_on_a_half_round_up() -> None:
    """floor(v + 0.5): -0.5 is the first voxel, 8.5 is past the last of nine."""
    largest = float(np.nextafter(np.float32(0.5), np.float32(0)))
    lines = [[-0.5, 0, 0], [0.5, 0, 0], [largest, 0, 0], [8.5, 0, 0], [-0.5000001, 0, 0]]
    index, inside = nearest_voxel(torch.tensor(lines), SHAPE)
    assert inside.tolist() == [True, True, True, False, False]
    assert index[inside].tolist() == [0, 11 * 13, 0]


def test_flat_indices_pass_two_to_the_31() -> None:
    """300^3 voxels and 80 landmarks."""
    shape = (2_000, 1_500, 1_000)
    index, inside = nearest_voxel(torch.tensor([[1999.0, 1499.0, 999.0]]), shape)
    assert inside.tolist() == [True]
    assert index.tolist() == [3_000_000_000 - 1]


def test_all_votes_in_one_voxel_do_not_overflow() -> None:
    """Three million unit votes: far past the 2,048 at which int32 would."""
    position = torch.tensor([[4.0, 5.0, 6.0]]).expand(3_000_000, 3)
    one = torch.ones(1).expand(3_000_000)
    votes = Votes(torch.zeros(1).long().expand(3_000_000), position, position, one, one)
    counters = torch.zeros(1, *SHAPE, dtype=torch.int64)
    add_votes(votes, votes.landmark, counters)
    assert int(counters[0, 4, 5, 6]) == 3_000_000 * FIXED_ONE
    assert int(counters.sum()) == 3_000_000 * FIXED_ONE


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


def test_no_votes_make_an_empty_heatmap() -> None:
    """Zeros, not an error."""
    none = empty_votes(torch.device("cpu"))
    assert not aggregate(none, [1], READOUT).any()
