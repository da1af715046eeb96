"""Votes -> peaks."""

import math

import numpy as np
import pytest

from app.voting.peaks import find_peaks, group_votes
from app.voting.readout import Readout
from app.voting.votes import Votes, concat_votes, filter_votes
from tests.support.synthetic import random_field, shuffled, votes_at

SHAPE = (9, 11, 13)
READOUT = Readout(3, SHAPE, (0.5, 0.75, 1.25), radius_mm=3.0)


def peaks_of(votes: Votes, readout: Readout = READOUT, count: int = 3) -> np.ndarray:
    """Find peaks in cells of one voxel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.voting.peaks.CELL_REACH", 0.0)
        return find_peaks(group_votes(votes, readout.landmarks), readout, count)[0]


def heights(votes: Votes) -> np.ndarray:
    """Weigh every voxel and what is around it by 1 2 1 along each axis, votes on whole voxels."""
    dense = np.zeros(np.array(SHAPE) + 2)
    i, j, k = (votes.position.numpy() + 1).astype(int).T
    np.add.at(dense, (i, j, k), votes.weight.numpy())
    for axis in range(3):
        dense = 2 * dense + np.roll(dense, 1, axis) + np.roll(dense, -1, axis)
    return dense[1:-1, 1:-1, 1:-1]


def half_diagonal(readout: Readout) -> float:
    """Return that of a cell, in mm: how far peaks may be from its centre."""
    return find_peaks(group_votes(concat_votes([]), readout.landmarks), readout, 1)[1]


@pytest.mark.parametrize(
    ("shape", "landmarks", "radius", "edge"),
    [
        ((70, 71, 72), 3, 1.0, 1),
        ((300, 301, 302), 3, 12.0, 4),
        ((300, 301, 302), 45, 2.0, 1),
        ((500, 501, 502), 3, 2.0, 1),
        ((64, 65, 66), 45, 5.0, 2),
    ],
)
def test_cells_are_as_coarse_as_the_readout_allows(
    shape: tuple[int, int, int], landmarks: int, radius: float, edge: int
) -> None:
    """Worked cases, at a spacing of 1 mm, however large the grid is."""
    readout = Readout(landmarks, shape, (1.0, 1.0, 1.0), radius)
    assert half_diagonal(readout) == pytest.approx(math.dist((0, 0, 0), [edge] * 3) / 2)


def test_cells_are_round_in_mm() -> None:
    """On an anisotropic grid they have fewer voxels along the axis of thick slices."""
    readout = Readout(1, (40, 50, 60), (0.5, 1.0, 3.0), radius_mm=10.0)
    assert half_diagonal(readout) == pytest.approx(math.dist((0, 0, 0), (7 * 0.5, 4, 3)) / 2)


def test_the_first_peak_is_where_most_votes_point_at_and_around() -> None:
    """Against a dense count, on whole voxels, weights all different."""
    random = np.random.default_rng(3)
    positions = random.integers(1, np.array(SHAPE) - 1, (60, 3)).astype(float)
    votes = votes_at(positions, landmark=1, probability=random.uniform(0.1, 1, 60).tolist())
    dense = heights(votes)
    hit = np.zeros(SHAPE, dtype=bool)
    hit[tuple(positions.astype(int).T)] = True
    expected = np.unravel_index(np.where(hit, dense, 0).argmax(), SHAPE)
    peaks = peaks_of(votes)
    np.testing.assert_allclose(peaks[:, 1, 0], np.array(expected) * READOUT.spacing_mm, atol=1e-9)
    assert np.isnan(peaks[:, [0, 2]]).all()


def test_equal_peaks_come_by_index_and_one_suppresses_its_reach() -> None:
    """Three equal positions, two of them within reach of each other: one suppresses the other."""
    votes = votes_at([[4, 5, 9], [4, 5, 2], [4, 5, 3]])
    peaks = peaks_of(votes)
    assert peaks[:, 0, 0].tolist() == [2.0, 3.75, 2.5]
    assert peaks[:, 0, 1].tolist() == [2.0, 3.75, 11.25]
    assert np.isnan(peaks[:, 0, 2]).all()


def test_a_vote_just_outside_the_grid_is_counted_in_the_margin() -> None:
    """The grid's border does not bound the cells that peaks are found in."""
    peaks = peaks_of(votes_at([[-4.0, 5.0, 14.0]]))
    np.testing.assert_allclose(peaks[:, 0, 0], (-2.0, 3.75, 17.5))


def test_votes_far_outside_are_left_out() -> None:
    """Also ones whose cell no integer could name."""
    votes = votes_at([[4, 5, 6], [1e30, 5, 6], [-1e30, 5, 6], [4, 5, 900]])
    peaks = peaks_of(votes)
    assert peaks[:, 0, 0].tolist() == [2.0, 3.75, 7.5]
    assert np.isnan(peaks[:, 0, 1:]).all()


def test_the_order_of_votes_changes_no_peak() -> None:
    """The sums are exact, and ties go by index."""
    votes = filter_votes(random_field(SHAPE, 3, "softmax"), 0.3)
    expected = peaks_of(votes)
    for seed in range(5):
        again = peaks_of(shuffled(votes, seed))
        np.testing.assert_array_equal(again, expected)


def test_peaks_take_no_memory_for_cells_that_are_not_hit() -> None:
    """A grid of a petavoxel, of which a table of all cells would fit no machine."""
    readout = Readout(1, (100_000, 100_000, 100_000), (1.0, 1.0, 1.0), radius_mm=2.0)
    peaks = peaks_of(votes_at([[99_998, 5, 77_777], [99_998, 5, 77_777], [3, 4, 5]]), readout)
    assert peaks[:, 0, :2].T.tolist() == [[99_998, 5, 77_777], [3, 4, 5]]


def test_votes_without_weight_change_no_peak() -> None:
    """The cell of one was the highest where others lay on all sides of it: a threshold may be 0."""
    around = [[2.0, 5.0, 6.0], [4.0, 5.0, 6.0], [3.0, 4.0, 6.0], [3.0, 6.0, 6.0]]
    alone, with_it = votes_at(around), votes_at([*around, [3.0, 5.0, 6.0]])
    with_it.columns[6:, 4] = 0.0
    np.testing.assert_array_equal(peaks_of(with_it), peaks_of(alone))


def test_no_votes_have_no_peaks() -> None:
    """Nothing is found without an error or a warning."""
    peaks = peaks_of(concat_votes([]))
    assert np.isnan(peaks).all()
