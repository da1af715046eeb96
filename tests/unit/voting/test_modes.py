"""Votes -> Modes."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from app.geometry import scaling, translation
from app.preprocessing.grid import ScanExtent
from app.voting.heatmaps import aggregate
from app.voting.modes import Modes, drop_padding, find_modes, voters_around
from app.voting.peaks import find_peaks, group_votes
from app.voting.readout import Readout
from app.voting.reference import Placement
from app.voting.votes import Votes, concat_votes, filter_votes
from tests.support import oracle
from tests.support.synthetic import (
    Activation,
    ball_votes,
    moved,
    pointing_at,
    random_field,
    shuffled,
    votes_at,
)

SHAPE = (48, 44, 52)
READOUT = Readout(1, SHAPE, (1.0, 1.0, 1.0), radius_mm=10.0)


SMALL = (9, 14, 21)
SPACING = (0.5, 0.75, 1.25)


def modes_of(votes: Votes, readout: Readout = READOUT, cell: int | None = None) -> Modes:
    """Go from votes to modes, in cells of the default size or a given one."""
    with pytest.MonkeyPatch.context() as patch:
        if cell is not None:
            patch.setattr("app.voting.peaks.CELL_REACH", cell / readout.reach_mm)
        return find_modes(votes, readout, 4)


def assert_same_bits(modes: Modes, expected: Modes) -> None:
    """Compare everything, exactly."""
    for name in Modes.__slots__:
        np.testing.assert_array_equal(getattr(modes, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("cell", [None, 1])
@pytest.mark.parametrize(
    ("outliers", "second", "bar"), [(0.0, 0.0, 0.03), (0.2, 0.0, 0.04), (0.0, 0.3, 0.40)]
)
def test_sub_voxel_accuracy_holds_its_bar(
    outliers: float, second: float, bar: float, cell: int | None
) -> None:
    """R = 10, sigma 1: mean error in voxels, clean, with outliers, with a second mode (V8)."""
    random = np.random.default_rng(8)
    errors = []
    for trial in range(16):
        centre = np.array([24, 22, 26]) + random.uniform(-4, 4, 3)
        votes = ball_votes(centre.tolist(), SHAPE, 10.0, seed=trial)
        stray = random.random(len(votes))
        position = votes.position.double().numpy()
        wild = stray < outliers
        position[wild] = random.uniform(0, SHAPE, (wild.sum(), 3))
        away = random.standard_normal(3)
        position[stray < second] += 14 * away / np.linalg.norm(away)
        modes = modes_of(pointing_at(votes, position), cell=cell)
        errors.append(np.linalg.norm(modes.position[0, 0] - centre))
    assert np.mean(errors) <= bar


def test_a_mode_is_the_fixed_point_of_the_oracles_mean_shift() -> None:
    """On an anisotropic grid, with everything that is summed over the votes within reach."""
    spacing = np.array([0.5, 0.75, 1.25])
    readout = Readout(1, SHAPE, (0.5, 0.75, 1.25), radius_mm=6.0)
    votes = concat_votes(
        [ball_votes((20.3, 21.1, 25.6), SHAPE, 8.0, noise=0.8), ball_votes((36, 9, 9), SHAPE, 4.0)]
    )
    modes = modes_of(votes, readout)
    position, weight = votes.position.double().numpy(), votes.weight.double().numpy()
    expected = oracle.mean_shift(position, weight, np.array([20.0, 21, 26]), 3.6, spacing)
    np.testing.assert_allclose(modes.position[0, 0], expected, atol=1e-5)

    distance = (position - expected) * spacing
    near = np.linalg.norm(distance, axis=1) <= 3.6
    outer = distance[near, :, None] * distance[near, None, :]
    covariance = np.average(outer, axis=0, weights=weight[near])
    source = np.average(votes.source.numpy()[near], axis=0, weights=weight[near])
    voters = oracle.voters(expected, SHAPE, spacing, 6.0, 1)
    np.testing.assert_allclose(modes.weight[0, 0], weight[near].sum(), rtol=1e-6)
    np.testing.assert_allclose(modes.covariance_mm2[0, 0], covariance, atol=1e-5)
    np.testing.assert_allclose(modes.source[0, 0], source, atol=1e-4)
    np.testing.assert_allclose(modes.mass[0, 0], weight[near].sum() / voters, rtol=1e-6)
    np.testing.assert_allclose(modes.coherence[0, 0], weight[near].sum() / weight.sum(), rtol=1e-6)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_order_of_votes_changes_no_bit(activation: Activation) -> None:
    """Votes in any order, in any number of batches: the same bits of everything (V7)."""
    shape = (13, 11, 16)
    readout = Readout(3, shape, (0.5, 0.75, 1.25), radius_mm=3.0)
    votes = filter_votes(random_field(shape, 3, activation), 0.3)
    expected = modes_of(votes, readout)
    for seed in range(8):
        assert_same_bits(modes_of(shuffled(votes, seed), readout), expected)


@given(seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_duplicated_votes_double_weight_and_nothing_else(seed: int) -> None:
    """Every position, share and spread stays."""
    votes = ball_votes((20.3, 21.1, 25.6), SHAPE, 5.0, seed=seed)
    once, twice = modes_of(votes), modes_of(concat_votes([votes, votes]))
    np.testing.assert_array_equal(twice.weight, 2 * once.weight)
    np.testing.assert_allclose(twice.position[0, 0], once.position[0, 0], atol=1e-9)
    np.testing.assert_allclose(twice.coherence, once.coherence, rtol=1e-12)


@given(shift=st.tuples(st.integers(-6, 6), st.integers(-6, 6), st.integers(-6, 6)))
@settings(max_examples=15)
def test_moved_votes_move_the_mode(shift: tuple[int, int, int]) -> None:
    """By as much, wherever heatmap cells begin: equivariant to less than a hundredth of a voxel."""
    votes = ball_votes((20.3, 21.1, 25.6), SHAPE, 6.0)
    here = modes_of(votes).position[0, 0]
    there = modes_of(moved(votes, torch.tensor(shift).float())).position[0, 0]
    np.testing.assert_allclose(there - here, shift, atol=0.01)


@pytest.mark.parametrize("cell", [2, 4])
def test_coarse_cells_give_the_same_modes(cell: int) -> None:
    """They only say where to start: also where a peak lies on the corner of eight cells."""
    corner = -12 + 4 * 9 - 0.5
    votes = concat_votes(
        [
            ball_votes((corner, corner, corner), SHAPE, 10.0),
            ball_votes((38.2, 30.9, 12.4), SHAPE, 7.0, seed=1),
        ]
    )
    fine, coarse = modes_of(votes, cell=1), modes_of(votes, cell=cell)
    for mode in range(2):
        np.testing.assert_allclose(coarse.position[0, mode], fine.position[0, mode], atol=0.01)
        np.testing.assert_allclose(coarse.mass[0, mode], fine.mass[0, mode], rtol=0.01)


def test_modes_come_heaviest_first_and_no_position_twice() -> None:
    """Three modes of one landmark, one of another, none of a third."""
    centres = [(12.0, 12, 12), (36.0, 30, 20), (14.0, 34, 40)]
    parts = [
        ball_votes(centre, SHAPE, radius, seed=1)
        for centre, radius in zip(centres, (5, 7, 6), strict=True)
    ]
    parts.append(ball_votes((25.0, 26, 27), SHAPE, 8.0, landmark=1))
    readout = Readout(3, SHAPE, (1.0, 1.0, 1.0), radius_mm=8.0)
    modes = modes_of(concat_votes(parts), readout)
    np.testing.assert_allclose(
        modes.position[0, :3], [centres[1], centres[2], centres[0]], atol=0.3
    )
    np.testing.assert_allclose(modes.position[1, 0], (25, 26, 27), atol=0.3)
    assert (np.diff(modes.weight, axis=1) <= 0).all()
    assert (modes.weight > 0).sum(axis=1).tolist() == [3, 1, 0]
    assert np.isnan(modes.position[modes.weight == 0]).all()
    assert np.isfinite(modes.coherence).all()
    np.testing.assert_allclose(modes.coherence.sum(axis=1), [1, 1, 0], atol=0.02)


def test_the_mass_of_a_sphere_cut_by_the_border_is_that_of_a_whole_one() -> None:
    """A landmark in a corner has an eighth of the voters, and as much of the votes."""
    whole = modes_of(ball_votes((24.0, 22, 26), SHAPE, 10.0))
    cut = modes_of(ball_votes((0.0, 0, 51), SHAPE, 10.0))
    assert cut.weight[0, 0] < whole.weight[0, 0] / 5
    np.testing.assert_allclose(cut.mass[0, 0], whole.mass[0, 0], rtol=0.01)


def test_votes_outside_the_grid_form_a_mode_there() -> None:
    """What a network sees of a landmark past the border is not moved inside."""
    modes = modes_of(ball_votes((-4.0, 20, 30), SHAPE, 10.0))
    np.testing.assert_allclose(modes.position[0, 0], (-4, 20, 30), atol=0.2)
    assert modes.coherence[0, 0] > 0.9


def test_all_votes_for_one_position_have_no_spread() -> None:
    """A covariance of zeros, and the position itself, to the resolution of fixed point."""
    modes = modes_of(votes_at([[7.25, 8.5, 9.125]] * 1000))
    np.testing.assert_allclose(modes.position[0, 0], (7.25, 8.5, 9.125), atol=1e-6)
    np.testing.assert_allclose(modes.covariance_mm2[0, 0], 0.0, atol=1e-6)
    assert modes.coherence[0, 0] == 1.0


def test_modes_take_no_memory_for_votes_beside_their_groups() -> None:
    """Three arrays of all votes were made to sum weights: half of the time of 90,000 votes."""
    random, readout = np.random.default_rng(1), replace(READOUT, landmarks=10)
    landmark = random.integers(10, size=50_000)
    votes = votes_at(random.normal(6.0, 0.2, (50_000, 3)), landmark=landmark.tolist())

    def peak_of(read: Callable[[], object]) -> int:
        read()  # Compiled now, at the latest.
        tracemalloc.start()
        read()
        _now, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    grouped = peak_of(lambda: find_peaks(group_votes(votes, 10), readout, 4))
    assert peak_of(lambda: find_modes(votes, readout, 4)) < grouped + len(votes)


def test_no_votes_have_no_modes() -> None:
    """Nothing to find is found without a warning."""
    modes = modes_of(concat_votes([]))
    assert not modes.weight.any()
    assert not modes.mass.any()
    assert np.isnan(modes.position).all()


@given(
    cuts=st.tuples(*[st.lists(st.integers(1, 10), max_size=2, unique=True)] * 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=20)
def test_the_tiles_that_a_field_is_cut_into_change_no_bit(
    cuts: tuple[list[int], list[int], list[int]], seed: int
) -> None:
    """Tiles of any shape, in any order, give the votes, modes and heatmaps of the whole (V7)."""
    shape = (13, 11, 16)
    readout = Readout(3, shape, (0.5, 0.75, 1.25), radius_mm=3.0)
    field = random_field(shape, 3, "sigmoid", seed)
    whole = filter_votes(field, 0.3)
    bounds = [sorted({0, *cut, size}) for cut, size in zip(cuts, shape, strict=True)]
    parts = []
    for corner in product(*[range(len(ends) - 1) for ends in bounds]):
        spans = [(ends[at], ends[at + 1]) for ends, at in zip(bounds, corner, strict=True)]
        i, j, k = [slice(first, last) for first, last in spans]
        scores, offsets = field.scores[:, i, j, k], field.offsets[:, :, i, j, k]
        tile = replace(field, scores=scores, offsets=offsets)
        (a, _), (b, _), (c, _) = spans
        parts.append(filter_votes(tile, 0.3, Placement((a, b, c))))
    parts = [parts[index] for index in np.random.default_rng(seed).permutation(len(parts))]
    votes = concat_votes(parts)
    assert_same_bits(modes_of(votes, readout), modes_of(whole, readout))
    heatmaps = aggregate(votes, range(3), readout, 0.6)
    assert torch.equal(heatmaps, aggregate(whole, range(3), readout, 0.6))


@given(seed=st.integers(0, 2**16), stride=st.sampled_from([1, 2, 3, 4]), radius=st.floats(0.5, 6.0))
@settings(max_examples=50)
def test_voters_are_counted_as_the_oracle_counts_them(
    seed: int, stride: int, radius: float
) -> None:
    """Spheres cut by borders, anisotropic spacing, strides that do not divide the grid."""
    random = np.random.default_rng(seed)
    points = random.uniform(-0.5, np.array(SMALL) - 0.5, (5, 3))
    readout = Readout(1, SMALL, SPACING, radius, stride)
    expected = [oracle.voters(p, SMALL, np.array(SPACING), radius, stride) for p in points]
    assert voters_around(points, readout).tolist() == [max(1, n) for n in expected]


def test_around_a_point_outside_at_least_an_octant_of_the_ball_is_counted() -> None:
    """A few voxels at the border prove nothing about a position beyond it."""
    readout = Readout(1, (40, 50, 60), (1.0, 1.0, 1.0), 6.0)
    ball = 4 / 3 * np.pi * 6**3
    points = np.array([[-6.0, 20, 20], [-30.0, 20, 20], [-1.0, 20, 20]])
    far, farther, near = voters_around(points, readout)
    assert far == farther == ball / 8
    assert ball / 3 < near < ball / 2


def test_around_nan_one_is_counted() -> None:
    """Absent modes can be divided by their count."""
    readout = Readout(1, SMALL, SPACING, 2.0)
    assert voters_around(np.full((2, 3, 3), np.nan), readout).tolist() == [[1.0] * 3] * 2


def test_voxels_where_there_is_no_scan_are_no_voters() -> None:
    """A grid that reaches past its scan on one side, by an oblique and scaled map."""
    rotation = Rotation.from_euler("xyz", (0.2, 0.1, -0.3)).as_matrix()
    to_volume = translation((-3.0, 1.0, 2.0)) @ np.pad(rotation, (0, 1)) @ scaling([2.0, 2.0, 2.0])
    to_volume[3, 3] = 1.0
    scan = ScanExtent(to_volume, (16, 25, 60))
    readout = Readout(1, SMALL, SPACING, 3.0, 2, scan)
    points = np.array([[4.0, 6, 10], [1.0, 2, 3], [8.0, 13, 20]])
    index = np.stack(np.meshgrid(*[np.arange(-(-n // 2)) for n in SMALL], indexing="ij"), axis=-1)
    centres = (index.reshape(-1, 3) + 0.5) * 2 - 0.5
    centres = centres[(centres <= np.array(SMALL) - 0.5).all(axis=1) & scan.contains(centres)]
    away = np.linalg.norm((points[:, None] - centres) * SPACING, axis=2)
    octant = np.pi / 6 * 3.0**3 / (8 * np.prod(SPACING))
    least = np.where(scan.contains(points), 1.0, octant)
    expected = np.maximum((away <= 3.0).sum(axis=1), least)
    np.testing.assert_allclose(voters_around(points, readout), expected)
    assert 0 < expected[0] < voters_around(points, replace(readout, scan=None))[0]


def test_voxels_on_a_face_of_the_scan_are_voters_whatever_is_rounded() -> None:
    """Those of a slice, of which a network of stride 2 answers one plane, whose votes are kept."""
    counts = []
    for rounded in (0.0, 1e-12):
        scan = ScanExtent(translation((0.0, rounded, 0.0)), (12, 1, 6))
        readout = Readout(1, (12, 2, 6), (1.0, 1.0, 1.0), 5.0, 2, scan)
        counts.append(float(voters_around(np.array([5.5, 0.5, 2.5]), readout)))
    assert counts[0] == counts[1] > 10


@pytest.mark.parametrize("thickness_mm", [1.0, 6.0])
def test_votes_of_a_coordinate_are_one_mode_up_to_the_diagonal_of_the_scan(
    thickness_mm: float,
) -> None:
    """Far apart, they were taken for several: positions moved, and what is unknown was found."""
    spacing, place = (1.0, 1.0, thickness_mm), np.array([12.0, 30.0, 9.0])
    diagonal_mm = float(np.linalg.norm(np.multiply(SHAPE, spacing)))
    readout = Readout(2, SHAPE, spacing, diagonal_mm, votes_each=6)
    elsewhere = ScanExtent(translation((-99.0, 0.0, 0.0)), SHAPE)  # No voxel there casts them.
    for share in (0.1, 0.5, 0.6, 0.95, 1.05, 2.0):
        sigma = share * diagonal_mm / np.linalg.norm(spacing)
        away = np.sqrt(3.0) * sigma * np.vstack([np.eye(3), -np.eye(3)])
        votes = votes_at(place + away, probability=0.4)
        assert drop_padding(votes, replace(readout, scan=elsewhere)) is votes
        modes = find_modes(votes, readout, 4)
        assert modes.weight[:, 0].tolist() == pytest.approx([2.4 * (share < 1), 0.0])
        assert modes.mass[:, 0].tolist() == pytest.approx([0.4 * (share < 1), 0.0])
        if share < 1:
            np.testing.assert_allclose(modes.position[0, 0], place, atol=1e-4)
            assert np.trace(modes.covariance_mm2[0, 0]) ** 0.5 == pytest.approx(
                share * diagonal_mm, rel=1e-4
            )
