"""Votes -> Landmarks: presence, coordinates, and how sure they are."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from app.errors import BadParameter
from app.geometry import transform, translation
from app.model import Shape
from app.model.outputs import Field
from app.preprocessing.grid import Grid
from app.voting.landmarks import Landmark, confidence_of, locate
from app.voting.readout import GridFrame, make_readout
from app.voting.reference import Placement
from app.voting.votes import Votes, concat_votes, filter_votes
from tests.support.synthetic import (
    SCAN_RADIUS,
    SCAN_SHAPE,
    ball_votes,
    find,
    find_on,
    make_grid,
    make_manifest,
    pointing_at,
    scattered,
    shuffled,
    thinned,
    votes_at,
)

Array = NDArray[np.float64]


def test_a_landmark_that_is_there_is_detected() -> None:
    """With 20 % outliers; everything is known about it."""
    (landmark,) = find(scattered(ball_votes((20.3, 17.6, 21.2), SCAN_SHAPE, SCAN_RADIUS), 0.2))
    assert landmark.status == "detected"
    assert landmark.ras_mm is not None
    np.testing.assert_allclose(landmark.ras_mm, (20.3, 17.6, 21.2), atol=0.3)
    assert 0.6 < landmark.mass < 0.7
    assert 0.75 < landmark.coherence < 0.9
    assert 0.7 < landmark.confidence < 0.9
    assert landmark.spread_mm == pytest.approx(np.sqrt(3), rel=0.1)
    assert landmark.disagreement_mm is not None
    assert landmark.disagreement_mm < 0.5
    assert landmark.region95_mm == 0.6
    assert landmark.expected_ras_mm is None
    assert len(landmark.candidates) == 1
    np.testing.assert_array_equal(landmark.candidates[0].ras_mm, landmark.ras_mm)


@pytest.mark.parametrize("threshold", [0.25, 0.0])
def test_a_landmark_without_votes_has_no_position(threshold: float) -> None:
    """Nulls everywhere, never (0, 0, 0)."""
    manifest, update = make_manifest(), {"presence_threshold": threshold}
    readout, frame = make_readout(make_grid(), manifest), GridFrame(np.eye(4), np.eye(4))
    specs = [one.model_copy(update=update) for one in manifest.landmarks]
    (landmark,) = locate(concat_votes([]), readout, frame, specs)
    assert landmark == Landmark(
        "0", "", "not_found", None, None, 0.0, 0.0, 0.0, None, None, None, None, ()
    )


def test_another_number_of_landmarks_is_refused() -> None:
    """Also where so many votes would be counted past the end of an array."""
    many = votes_at(np.full((10_000, 3), 20.0), landmark=list(range(10_000)))
    with pytest.raises(BadParameter, match=r"votes for 1 landmarks, .* got some for 10000"):
        find(many)
    readout = make_readout(make_grid(), make_manifest(2))
    frame = GridFrame(np.eye(4), np.eye(4))
    with pytest.raises(BadParameter, match=r"specs for 2 landmarks, as are read out, got 3"):
        locate(concat_votes([]), readout, frame, make_manifest(3).landmarks)


def test_confident_votes_that_agree_on_nothing_are_no_landmark() -> None:
    """As many votes as a landmark has, all over the grid."""
    (landmark,) = find(scattered(ball_votes((20.0, 17, 21), SCAN_SHAPE, SCAN_RADIUS), 1.0))
    assert landmark.status == "not_found"
    assert landmark.ijk is None
    assert landmark.confidence < 0.1


def test_few_votes_that_agree_are_low_confidence() -> None:
    """A mass between a quarter of the threshold and the threshold; no 95 % region is given."""
    (landmark,) = find(thinned(ball_votes((20.0, 17, 21), SCAN_SHAPE, SCAN_RADIUS), 0.2))
    assert landmark.status == "low_confidence"
    assert landmark.ijk is not None
    assert landmark.region95_mm is None
    assert 0.2 < landmark.confidence < 0.5


def test_two_coherent_modes_are_listed_best_first() -> None:
    """Neither holds most of the votes for sure: three modes of a third each are low confidence."""
    centres = [(10.0, 10, 10), (30.0, 10, 32), (12.0, 28, 30)]
    parts = [ball_votes(p, SCAN_SHAPE, r) for p, r in zip(centres, (5.0, 5.6, 5.3), strict=True)]
    (two,) = find(concat_votes([parts[1], thinned(parts[0], 0.8)]))
    assert two.status == "detected"
    found = [candidate.ras_mm for candidate in two.candidates]
    np.testing.assert_allclose(found, [centres[1], centres[0]], atol=0.4)
    assert two.candidates[0].mass > two.candidates[1].mass
    (three,) = find(concat_votes(parts))
    assert three.status == "low_confidence"
    assert three.coherence < 0.5
    assert len(three.candidates) == 3


def test_a_mode_of_few_votes_or_outside_the_volume_is_no_candidate() -> None:
    places = np.array([(30.0, 10, 32), (12.0, 28, 30), (10.0, -2, 10)])
    parts = [ball_votes(tuple(place), SCAN_SHAPE, 5.0) for place in places]
    parts[1] = thinned(parts[1], 0.03)
    agreeing = zip(parts, places, strict=True)
    votes = [pointing_at(part, np.tile(place, (len(part), 1))) for part, place in agreeing]
    (landmark,) = find(concat_votes(votes))
    assert len(landmark.candidates) == 1


def test_a_landmark_outside_the_volume_is_out_of_field() -> None:
    """Coherent votes point past the border: a legitimate answer, without coordinates."""
    (landmark,) = find(ball_votes((-2.5, 17, 21), SCAN_SHAPE, SCAN_RADIUS))
    assert landmark.status == "out_of_field"
    assert landmark.ijk is None
    assert landmark.ras_mm is None
    assert landmark.candidates == ()
    assert landmark.confidence > 0.5


def test_a_few_voxels_at_the_border_do_not_make_a_landmark_outside() -> None:
    """A position almost a radius past the border has too few voters."""
    (landmark,) = find(ball_votes((-5.6, 17, 21), SCAN_SHAPE, SCAN_RADIUS))
    assert landmark.status == "not_found"


def test_a_sphere_cut_by_the_border_is_as_sure_as_a_whole_one() -> None:
    """In a corner of the grid."""
    (whole,) = find(ball_votes((20.0, 17, 21), SCAN_SHAPE, SCAN_RADIUS))
    (cut,) = find(ball_votes((0.2, 0.1, 42.8), SCAN_SHAPE, SCAN_RADIUS))
    assert cut.status == "detected"
    assert cut.mass == pytest.approx(whole.mass, rel=0.05)


def test_votes_of_padding_are_not_counted() -> None:
    """A voxel past the grid's end is no voxel of the scan."""
    votes = ball_votes((37.0, 17, 21), (48, 36, 44), SCAN_RADIUS)
    assert bool((votes.source[:, 0] > SCAN_SHAPE[0]).any())
    (padded,) = find(votes)
    (clean,) = find(votes.select(votes.source[:, 0] < SCAN_SHAPE[0]))
    assert padded.mass == clean.mass
    assert padded.mass == pytest.approx(0.8, rel=0.05)


def test_votes_of_padding_before_the_grid_are_not_counted() -> None:
    """As some layouts pad small scans, on both sides."""
    votes = ball_votes((15.0, 17, 21), (48, 36, 44), SCAN_RADIUS)
    columns = votes.columns.clone()
    columns[0] -= 13.0  # Sources.
    columns[3] -= 13.0  # Positions.
    moved = Votes(votes.landmark, columns)
    assert bool((moved.source[:, 0] < 0).any())
    (padded,) = find(moved)
    (clean,) = find(moved.select(moved.source[:, 0] >= 0))
    assert padded.mass == clean.mass


def make_constellation() -> Array:
    """Place eight landmarks in the grid, as no plane and no symmetry has them."""
    return np.array(
        [
            [8.0, 8, 9],
            [31, 9, 10],
            [9, 28, 12],
            [30, 27, 34],
            [8, 10, 34],
            [21, 8, 33],
            [20, 28, 20],
            [30, 18, 20],
        ]
    )


def constellation_votes(truth: Array, wrong: Sequence[int], stronger: Array) -> Votes:
    """Vote for every landmark; ones in ``wrong`` have a stronger mode elsewhere."""
    parts = []
    for c, centre in enumerate(truth):
        part = ball_votes(centre.tolist(), SCAN_SHAPE, 4.5, landmark=c, seed=c)
        if c in wrong:
            part = concat_votes(
                [
                    thinned(part, 0.9),
                    ball_votes(stronger.tolist(), SCAN_SHAPE, 5.0, landmark=c, seed=c),
                ]
            )
        parts.append(part)
    return concat_votes(parts)


def test_the_shape_chooses_among_modes_and_moves_no_point() -> None:
    """The weaker mode fits; the answer is that mode, and the stronger one is a candidate."""
    truth = make_constellation()
    votes = constellation_votes(truth, [2, 5], np.array([20.0, 18, 10]))
    mean = Rotation.from_euler("xyz", (0.4, -1.1, 2.0)).apply(0.9 * truth) - 3.0
    mean[0] += 0.7  # A mean shape is never the subject's own.
    mean[7] = np.nan  # In no shape: its votes alone decide.
    with_shape, without = find(votes, truth=mean, landmarks=8), find(votes, landmarks=8)
    alone = find(constellation_votes(truth, [], truth[0]), landmarks=8)
    for c in range(8):
        landmark = with_shape[c]
        assert landmark.status == "detected"
        assert landmark.ras_mm is not None
        assert landmark.expected_ras_mm is None
        np.testing.assert_allclose(landmark.ras_mm, truth[c], atol=0.6)
        if c not in (2, 5):
            assert alone[c].ras_mm is not None
            np.testing.assert_array_equal(landmark.ras_mm, alone[c].ras_mm)
    for c in (2, 5):
        assert without[c].ras_mm is not None
        assert np.linalg.norm(without[c].ras_mm - truth[c]) > 5
        np.testing.assert_allclose(with_shape[c].candidates[1].ras_mm, (20, 18, 10), atol=0.6)
    one_mode = Shape(mean, tolerance_mm=2.0, modes=1)
    strongest = find_on(make_grid(), votes, make_manifest(8, shape=True), one_mode)
    assert {len(landmark.candidates) for landmark in strongest} == {1}


def test_a_mode_far_from_the_fit_is_low_confidence_with_the_expected_position_given() -> None:
    """The best mode is returned, not moved; a weak one is not found, but still expected."""
    truth = make_constellation()
    moved = truth.copy()
    moved[6] = (33, 30, 8)
    landmark = find(constellation_votes(moved, [], truth[0]), truth=truth, landmarks=8)[6]
    assert landmark.status == "low_confidence"
    assert landmark.ras_mm is not None
    assert landmark.expected_ras_mm is not None
    np.testing.assert_allclose(landmark.ras_mm, moved[6], atol=0.6)
    np.testing.assert_allclose(landmark.expected_ras_mm, truth[6], atol=0.6)
    assert landmark.confidence < 0.5

    votes = constellation_votes(moved, [], truth[0])
    rare = (votes.landmark != 6) | (torch.arange(len(votes)) % 4 == 0)
    gone = find(votes.select(rare), truth=truth, landmarks=8)[6]
    assert gone.status == "not_found"
    assert gone.ras_mm is None
    assert gone.expected_ras_mm is not None
    assert gone.candidates == ()


def test_nothing_is_detected_if_the_shape_cannot_be_fitted() -> None:
    """Strong modes everywhere, in no similarity to the shape."""
    truth = make_constellation()
    permuted = np.random.default_rng(4).permutation(truth)
    votes = constellation_votes(permuted, [], truth[0])
    for landmark in find(votes, truth=truth, landmarks=8):
        assert landmark.status == "low_confidence"
        assert landmark.expected_ras_mm is None
        assert landmark.confidence < 0.5


CHAIN = np.array(
    [(20 + 14 * np.cos(angle), 4 + 14 * np.sin(angle), 22.0) for angle in np.arange(0.2, 3.1, 0.5)]
)
"""Links of an arc, each as far from the next: the first five may be taken for the last five."""


def find_chain(shares: Sequence[float], beside: int = 0) -> tuple[Landmark, ...]:
    """Find five links of the chain, of which each has some share of its votes, and some one on.

    Beside them, the shape has landmarks in the scan that have no votes.
    """
    votes = [
        thinned(ball_votes(CHAIN[link + on], SCAN_SHAPE, SCAN_RADIUS, landmark=link), share)
        for link in range(5)
        for on, share in enumerate(shares)
    ]
    others = np.random.default_rng(0).uniform(8, 24, (beside, 3))
    truth = np.concatenate([CHAIN[:5], others])
    return find(concat_votes(votes), truth=truth, landmarks=len(truth))


@pytest.mark.parametrize(("here", "further"), [(1.0, 0.5), (0.7, 0.7), (0.45, 1.0)])
def test_an_arrangement_one_link_further_with_as_many_votes_is_named(
    here: float, further: float
) -> None:
    found = find_chain([here, further])
    rivals = {landmark.rival for landmark in found}
    assert len(rivals) == 1
    (rival,) = rivals
    assert rival is not None
    assert min(rival.share, 1 / rival.share) == pytest.approx(
        min(here, further) / max(here, further), abs=0.12
    )
    assert rival.distance_mm == pytest.approx(2 * 14 * np.sin(0.25), abs=0.3)


def test_one_with_few_votes_or_of_few_landmarks_is_no_rival() -> None:
    found = find_chain([1.0, 0.25])
    assert {landmark.rival for landmark in found} == {None}
    places = np.array([landmark.ras_mm for landmark in found])
    assert np.linalg.norm(places - CHAIN[:5], axis=1).max() < 1.0


def test_a_fit_to_less_than_half_of_what_it_expects_has_no_rival() -> None:
    """What there is of a subject is then mostly what is taken for other parts of it."""
    for beside, status, has_rival in ((5, "detected", True), (6, "low_confidence", False)):
        found = find_chain([1.0, 0.7], beside)[:5]
        assert {landmark.status for landmark in found} == {status}
        assert {landmark.rival is not None for landmark in found} == {has_rival}


def test_a_shape_of_too_few_landmarks_is_ignored() -> None:
    """Three known rows cannot be checked, so the votes alone decide."""
    truth = make_constellation()
    votes = constellation_votes(truth, [], truth[0])
    truth[3:] = np.nan
    assert {mark.status for mark in find(votes, truth=truth, landmarks=8)} == {"detected"}


def test_coordinates_go_through_the_grids_own_affines() -> None:
    """To the uploaded array's voxels and to mm: anisotropic, flipped and oblique."""
    rotation = np.eye(4)
    rotation[:3, :3] = Rotation.from_euler("zyx", (0.3, 0.5, -0.2)).as_matrix()
    to_volume = np.array([[0.0, -2, 0, 78], [1.5, 0, 0, 3], [0, 0, 0.5, 1], [0, 0, 0, 1]])
    to_world = translation((-30.0, 12.0, 7.0)) @ rotation @ np.diag([0.5, 0.5, 0.5, 1])
    grid = Grid(torch.zeros(SCAN_SHAPE), to_volume, to_world, (0.5, 0.5, 0.5))
    votes = ball_votes((20.3, 17.6, 21.2), SCAN_SHAPE, SCAN_RADIUS)
    (landmark,) = find_on(grid, votes, make_manifest(spacing=0.5))
    (plain,) = find(votes)
    assert plain.ijk is not None
    assert landmark.ijk is not None
    assert landmark.ras_mm is not None
    assert plain.spread_mm is not None
    np.testing.assert_allclose(landmark.ijk, transform(to_volume, plain.ijk), atol=1e-6)
    np.testing.assert_allclose(landmark.ras_mm, transform(to_world, plain.ijk), atol=1e-6)
    assert landmark.spread_mm == pytest.approx(plain.spread_mm / 2)
    assert landmark.mass == pytest.approx(plain.mass)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_coarser_field_finds_the_same_landmark_as_surely(stride: int) -> None:
    """Fewer voxels vote, and as many fewer could have."""
    centre = np.array([20.3, 17.6, 21.2])
    counts = [-(-n // stride) for n in SCAN_SHAPE]
    axes = [(np.arange(n) + 0.5) * stride - 0.5 for n in counts]
    away = centre - np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    near = np.linalg.norm(away, axis=-1) <= SCAN_RADIUS
    field = Field(
        torch.from_numpy(np.where(near, 3.0, -5.0)).float()[None],
        torch.from_numpy(away).float().permute(3, 0, 1, 2)[:, None],
        "sigmoid",
        background=False,
    )
    votes = filter_votes(field, 0.3, Placement(stride=stride))
    (landmark,) = find_on(make_grid(), votes, make_manifest(stride=stride))
    assert landmark.ijk is not None
    np.testing.assert_allclose(landmark.ijk, centre, atol=1e-4)
    assert landmark.mass == pytest.approx(1 / (1 + np.exp(-3.0)), rel=1e-5)


def test_the_order_of_votes_changes_no_bit_of_the_answer() -> None:
    """With a shape, second modes and outliers."""
    truth = make_constellation()
    votes = scattered(constellation_votes(truth, [2, 5], np.array([20.0, 18, 10])), 0.2)
    expected = repr(find(votes, truth=truth, landmarks=8))
    for seed in range(5):
        assert repr(find(shuffled(votes, seed), truth=truth, landmarks=8)) == expected


@given(mass=st.floats(0, 2), more=st.floats(0, 1), coherence=st.floats(0, 1), extra=st.floats(0, 1))
@settings(max_examples=100)
def test_confidence_grows_with_mass_and_coherence(
    mass: float, more: float, coherence: float, extra: float
) -> None:
    """Within [0, 1], and a half at the presence threshold."""
    confidence = confidence_of(mass, coherence, 0.25)
    assert 0 <= confidence <= 1
    assert confidence_of(mass + more, coherence, 0.25) >= confidence
    assert confidence_of(mass, min(1.0, coherence + extra), 0.25) >= confidence
    assert confidence_of(0.25, 1.0, 0.25) == 0.5
    assert confidence_of(mass, 1.0, 0.0) == float(mass > 0)
