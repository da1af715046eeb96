"""Modes -> the mode of every landmark that fits the shape of them all."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from app.voting.constellation import Shape, fit_constellation
from app.voting.similarity import fit_similarity, mean_shape

Array = NDArray[np.float64]
LANDMARKS = 45
TOLERANCE_MM = 1.0


def make_shape(seed: int = 0, landmarks: int = LANDMARKS) -> Array:
    """Make a shape the size of a mouse skull: some 22 x 12 x 9 mm."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, (landmarks, 3)) * (22.0, 12.0, 9.0)


def make_subject(mean: Array, seed: int, variation_mm: float = 0.15) -> Array:
    """Turn, scale and shift a shape, and let every landmark of it vary."""
    random = np.random.default_rng(seed)
    varied = mean + variation_mm * random.standard_normal(mean.shape)
    turned = Rotation.random(random_state=seed).apply(varied * random.uniform(0.8, 1.25))
    return np.asarray(turned + random.uniform(-40, 40, 3))


def make_modes(
    truth: Array, wrong: float, seed: int, modes: int = 4
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Make modes, strongest first; in a share of landmarks the strongest is elsewhere.

    Returns:
        Places, strengths, and which mode is the right one.
    """
    random = np.random.default_rng(seed + 1000)
    count = len(truth)
    low, high = truth.min(axis=0), truth.max(axis=0)
    places = random.uniform(low, high, (count, modes, 3))
    # Look-alikes: half of the wrong modes sit on another landmark.
    other = truth[random.integers(0, count, (count, modes))]
    places = np.where(random.random((count, modes, 1)) < 0.5, other, places)
    strength = -np.sort(-random.uniform(0.1, 1.0, (count, modes)), axis=1)
    right = np.zeros(count, dtype=np.int64)
    right[random.permutation(count)[: round(wrong * count)]] = 1
    places[np.arange(count), right] = truth + 0.1 * random.standard_normal(truth.shape)
    return places, strength, right


@pytest.mark.parametrize("seed", range(12))
def test_the_right_modes_are_chosen_where_a_third_of_the_strongest_is_wrong(seed: int) -> None:
    """45 landmarks, 4 modes each, any pose."""
    mean = make_shape(seed)
    truth = make_subject(mean, seed)
    places, strength, _ = make_modes(truth, 1 / 3, seed)
    fit = fit_constellation(places, strength, Shape(mean, TOLERANCE_MM))
    assert fit is not None
    chosen = places[np.arange(LANDMARKS), fit.choice]
    assert (fit.choice >= 0).all()
    assert (np.linalg.norm(chosen - truth, axis=1) < 0.6).all()
    assert np.linalg.norm(fit.expected_mm - truth, axis=1).mean() < 0.4


@pytest.mark.parametrize("present", [4, 6, 12, 30])
def test_any_number_of_present_landmarks_from_four_on_is_enough(present: int) -> None:
    """Landmarks without modes have a place expected, and no mode chosen."""
    mean = make_shape(present)
    truth = make_subject(mean, present)
    places, strength, right = make_modes(truth, 0.25, present)
    gone = np.random.default_rng(present).permutation(LANDMARKS)[present:]
    places[gone], strength[gone] = np.nan, 0.0
    fit = fit_constellation(places, strength, Shape(mean, TOLERANCE_MM))
    assert fit is not None
    here = np.setdiff1d(np.arange(LANDMARKS), gone)
    assert (fit.choice[gone] == -1).all()
    assert (fit.choice[here] == right[here]).mean() >= 0.75
    assert np.isfinite(fit.expected_mm).all()


def test_a_landmark_with_no_mode_near_the_fit_gets_none() -> None:
    """All its modes are elsewhere: the expected place is told, no point is moved there."""
    mean = make_shape()
    truth = make_subject(mean, 1)
    places, strength, _ = make_modes(truth, 0.2, 1)
    places[7] = truth[7] + np.array([[5.0, 0, 0], [0, 6.0, 0], [0, 0, 7.0], [-8.0, 0, 0]])
    fit = fit_constellation(places, strength, Shape(mean, TOLERANCE_MM))
    assert fit is not None
    assert fit.choice[7] == -1
    assert np.linalg.norm(fit.expected_mm[7] - truth[7]) < 0.6


def test_a_landmark_of_unknown_place_takes_no_part() -> None:
    """A NaN row of the mean shape has no expectation and no choice."""
    mean = make_shape()
    truth = make_subject(mean, 2)
    places, strength, _ = make_modes(truth, 0.2, 2)
    mean[[3, 40]] = np.nan
    fit = fit_constellation(places, strength, Shape(mean, TOLERANCE_MM))
    assert fit is not None
    assert np.isnan(fit.expected_mm[[3, 40]]).all()
    assert (fit.choice[[3, 40]] == -1).all()
    assert (np.delete(fit.choice, [3, 40]) >= 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_noise_fits_no_shape(seed: int) -> None:
    """Nor does a mirror image, as a similarity holds no reflection."""
    mean = make_shape(seed)
    truth = make_subject(mean, seed)
    noise, strength, _ = make_modes(np.random.default_rng(seed).permutation(truth), 0.0, seed)
    assert fit_constellation(noise, strength, Shape(mean, TOLERANCE_MM)) is None
    mirrored, strength, _ = make_modes(truth * (-1, 1, 1), 0.0, seed)
    assert fit_constellation(mirrored, strength, Shape(mean, TOLERANCE_MM)) is None


def test_three_landmarks_are_no_constellation() -> None:
    """Any triangle fits well enough to mean nothing."""
    mean = make_shape()
    places, strength, _ = make_modes(make_subject(mean, 0), 0.0, 0)
    strength[3:] = 0.0
    assert fit_constellation(places, strength, Shape(mean, TOLERANCE_MM)) is None


def test_a_subject_of_another_order_of_size_is_refused() -> None:
    """Scale is bounded: a cluster of false modes is no tiny skull."""
    mean = make_shape()
    places, strength, _ = make_modes(0.2 * make_subject(mean, 0), 0.0, 0)
    assert fit_constellation(places, strength, Shape(mean, 0.2)) is None


def test_the_same_modes_give_the_same_bits() -> None:
    """Random draws have a fixed seed."""
    mean = make_shape()
    places, strength, _ = make_modes(make_subject(mean, 5), 1 / 3, 5)
    fits = [fit_constellation(places, strength, Shape(mean, TOLERANCE_MM)) for _ in range(2)]
    assert fits[0] is not None
    assert fits[1] is not None
    np.testing.assert_array_equal(fits[0].expected_mm, fits[1].expected_mm)
    np.testing.assert_array_equal(fits[0].choice, fits[1].choice)


def test_a_fit_takes_a_fraction_of_a_tile() -> None:
    """45 landmarks, 4 modes: below 50 ms of a core of one's own; this thread's time, fourfold."""
    mean = make_shape()
    places, strength, _ = make_modes(make_subject(mean, 5), 1 / 3, 5)
    spent = []
    for _ in range(5):
        start = time.thread_time()
        fit_constellation(places, strength, Shape(mean, TOLERANCE_MM))
        spent.append(time.thread_time() - start)
    assert min(spent) < 0.2


@given(seed=st.integers(0, 2**16), scale=st.floats(0.1, 10.0))
@settings(max_examples=25, deadline=None)
def test_a_similarity_is_recovered_exactly(seed: int, scale: float) -> None:
    """Umeyama's fit of points to their own image."""
    random = np.random.default_rng(seed)
    source = random.standard_normal((6, 3))
    rotation = Rotation.random(random_state=seed).as_matrix()
    shift = random.uniform(-9, 9, 3)
    target = scale * source @ rotation.T + shift
    fit = fit_similarity(source, target, random.uniform(0.1, 1.0, 6))
    np.testing.assert_allclose(fit.scale, scale, rtol=1e-9)
    np.testing.assert_allclose(fit.rotation, rotation, atol=1e-9)
    np.testing.assert_allclose(fit.translation, shift, atol=1e-8)
    np.testing.assert_allclose(fit.apply(source), target, atol=1e-8)


def test_a_point_of_weight_zero_is_not_fitted() -> None:
    """Nor does a reflection come out where one would fit better."""
    source = make_shape(landmarks=7)
    target = source + 3.0
    target[4] = 1e5
    weight = np.ones(7)
    weight[4] = 0.0
    np.testing.assert_allclose(fit_similarity(source, target, weight).translation, 3.0, atol=1e-9)
    mirrored = fit_similarity(source, source * (-1, 1, 1), np.ones(7))
    assert np.linalg.det(mirrored.rotation) == pytest.approx(1.0)


def test_the_mean_shape_of_moved_copies_is_the_shape() -> None:
    """Up to pose, and of the copies' mean size; landmarks missing here and there are no matter."""
    shape = make_shape(3)
    random = np.random.default_rng(3)
    scales = random.uniform(0.7, 1.4, 8)
    sets = []
    for seed, scale in enumerate(scales):
        points = Rotation.random(random_state=seed).apply(scale * shape) + random.uniform(-9, 9, 3)
        points[random.permutation(LANDMARKS)[:5]] = np.nan
        points[11] = np.nan
        sets.append(points)
    mean = mean_shape(sets)
    assert np.isnan(mean[11]).all()
    known = np.isfinite(mean).all(axis=1)
    assert known.sum() == LANDMARKS - 1
    fit = fit_similarity(mean[known], shape[known], np.ones(known.sum()))
    np.testing.assert_allclose(fit.apply(mean[known]), shape[known], atol=1e-5)
    np.testing.assert_allclose(1 / fit.scale, np.exp(np.log(scales).mean()), rtol=1e-5)
    np.testing.assert_allclose(mean[known].mean(axis=0), 0.0, atol=1e-9)


def test_the_mean_shape_averages_variation_away() -> None:
    """Twenty varied subjects: the mean is nearer to the shape than any of them."""
    shape = make_shape(4)
    mean = mean_shape([make_subject(shape, seed, variation_mm=0.3) for seed in range(20)])
    fit = fit_similarity(mean, shape, np.ones(LANDMARKS))
    assert np.linalg.norm(fit.apply(mean) - shape, axis=1).mean() < 0.2
