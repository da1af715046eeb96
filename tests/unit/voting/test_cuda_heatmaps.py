"""Votes -> fixed-point sums on CUDA: the kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.voting.heatmaps import FIXED_ONE
from app.voting.heatmaps import count_votes as count_plainly
from app.voting.votes import Votes, empty_votes, filter_votes
from tests.support.synthetic import random_field, shuffled, votes_at

pytest.importorskip("triton")

from app.voting.cuda.heatmaps import count_votes

SHAPE = (4, 6, 9)


def on(device: torch.device, votes: Votes) -> Votes:
    """Move votes."""
    return Votes(*(getattr(votes, name).to(device) for name in Votes.__slots__))


def counted(
    votes: Votes, device: torch.device, shape: tuple[int, int, int] = SHAPE
) -> torch.Tensor:
    """Count votes by the kernel, those of the third landmark in no heatmap."""
    counters = torch.zeros(2, *shape, dtype=torch.int64, device=device)
    there = on(device, votes)
    count_votes(there, there.landmark, counters, FIXED_ONE)
    return counters.cpu()


@given(seed=st.integers(0, 2**16))
@settings(max_examples=10, deadline=None)
def test_sums_are_those_of_plain_torch_in_every_bit_and_order(
    device: torch.device, seed: int
) -> None:
    votes = filter_votes(random_field(SHAPE, 3, "softmax", seed), 0.3)
    expected = torch.zeros(2, *SHAPE, dtype=torch.int64)
    count_plainly(votes, votes.landmark, expected)
    assert expected.any()
    assert torch.equal(counted(votes, device), expected)
    assert torch.equal(counted(shuffled(votes, seed), device), expected)


def test_positions_on_a_half_round_up_and_those_outside_are_left_out(device: torch.device) -> None:
    """As of ``voxel_index``; what is no place is outside, too."""
    below = float(torch.nextafter(torch.tensor(0.5), torch.tensor(0.0)))
    places = [[-0.5, 0, 0], [0.5, 0, 0], [below, 0, 0], [3.5, 0, 0], [-0.5000001, 0, 0]]
    places += [[float("nan"), 0, 0], [0, float("inf"), 0], [0, 0, -float("inf")], [0, 0, 1e30]]
    counters = counted(votes_at(places), device)
    assert int(counters[0, 0, 0, 0]) == 2 * FIXED_ONE
    assert int(counters[0, 1, 0, 0]) == FIXED_ONE
    assert int(counters.sum()) == 3 * FIXED_ONE


@pytest.mark.parametrize("weight", [2.5 / 2**24, 3.5 / 2**24, 0.3, 1.0, 2.0**30, 0.0])
def test_weights_are_rounded_as_torch_rounds_them(weight: float, device: torch.device) -> None:
    """To the even of two neighbours; what float32 holds as a whole number stays."""
    votes = votes_at([[1.0, 2.0, 3.0]], probability=weight)
    expected = torch.zeros(2, *SHAPE, dtype=torch.int64)
    count_plainly(votes, votes.landmark, expected)
    assert torch.equal(counted(votes, device), expected)


def test_all_votes_in_one_voxel_do_not_overflow(device: torch.device) -> None:
    place = torch.tensor([[1.0, 2.0, 3.0]]).expand(5_000, 3)
    one = torch.ones(1).expand(5_000)
    votes = Votes(torch.zeros(1).long().expand(5_000), place, place, one, one)
    assert int(counted(votes, device)[0, 1, 2, 3]) == 5_000 * FIXED_ONE


def test_no_votes_add_nothing(device: torch.device) -> None:
    assert not counted(empty_votes(torch.device("cpu")), device).any()
