"""Votes -> sums of modes on CUDA: the kernels and what calls them."""

import numpy as np
import pytest
import torch

from app.voting.modes import ModeSums, sum_modes
from app.voting.readout import Readout, choose_cells
from app.voting.votes import Votes, concat_votes, empty_votes
from tests.support.synthetic import ball_votes, shuffled

pytest.importorskip("triton")

from app.voting.cuda.modes import ModeFinder

SHAPE = (24, 20, 28)
READOUT = Readout(3, SHAPE, (0.5, 0.75, 1.25), radius_mm=4.0)


def some_votes() -> Votes:
    """Make two modes of one landmark, one of another, none of a third."""
    return concat_votes(
        [
            ball_votes((8.3, 7.1, 9.6), SHAPE, 3.0, noise=0.8),
            ball_votes((17.0, 14.0, 20.0), SHAPE, 2.0, seed=1),
            ball_votes((12.4, 9.9, 13.3), SHAPE, 3.0, landmark=1, noise=1.5, seed=2),
        ]
    )


def found_by_kernels(votes: Votes, device: torch.device) -> ModeSums:
    """Find modes and their sums on a device."""
    columns = (votes.landmark, votes.position, votes.source, votes.weight)
    a, b, c, d = (column.to(device) for column in columns)
    return ModeSums(*ModeFinder((a, b, c, d), READOUT, 3, choose_cells(READOUT)).find())


def test_centres_and_sums_are_those_of_the_host(device: torch.device) -> None:
    votes = some_votes()
    expected = sum_modes(votes, READOUT, 3, choose_cells(READOUT))
    ours = found_by_kernels(votes, device)
    assert np.isfinite(expected.centres[:, 0, 0]).sum() == 2
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        np.testing.assert_array_equal(mine, theirs)


def test_order_of_votes_changes_no_bit(device: torch.device) -> None:
    expected = found_by_kernels(some_votes(), device)
    again = found_by_kernels(shuffled(some_votes(), 3), device)
    for mine, theirs in zip(again, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_no_votes_have_no_modes(device: torch.device) -> None:
    centres, sums, total = found_by_kernels(empty_votes(torch.device("cpu")), device)
    assert np.isnan(centres).all()
    assert not sums.any()
    assert not total.any()
