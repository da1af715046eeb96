"""Similarities between point sets, and their mean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from app.shapes import fit_similarity, mean_shape, measure_stretch, measure_twist
from tests.support.synthetic import SHAPE_LANDMARKS as LANDMARKS
from tests.support.synthetic import make_shape, make_subject


@given(seed=st.integers(0, 2**16), scale=st.floats(0.1, 10.0))
@settings(max_examples=25)
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


def test_sets_of_too_few_points_are_left_out_of_the_mean_shape() -> None:
    random = np.random.default_rng(5)
    sets = [20 * random.normal(size=(6, 3)) for _ in range(2)]
    poor = np.full((2, 6, 3), np.nan)
    poor[0, 2], poor[1, :2] = (9.0, 8.0, 7.0), sets[0][:2]
    np.testing.assert_array_equal(mean_shape([*sets, *poor]), mean_shape(sets))


def test_sets_that_share_one_place_alone_are_left_out_of_the_mean_shape() -> None:
    """Points that were never placed, all at 0, 0, 0, beside others that no other set has."""
    random = np.random.default_rng(5)
    sets = [20 * random.normal(size=(9, 3)) for _ in range(3)]
    for one in sets[:2]:
        one[7:] = np.nan
    sets[2][:4], sets[2][4:7] = 0.0, np.nan
    np.testing.assert_array_equal(mean_shape(sets), mean_shape(sets[:2]))
    sets[2][:7], sets[0][6] = 0.0, np.nan  # Now it is the one that has most.
    np.testing.assert_allclose(mean_shape(sets), sets[2] - sets[2].mean(axis=0), atol=1e-9)


def test_the_mean_shape_averages_variation_away() -> None:
    """Twenty varied subjects: the mean is nearer to the shape than any of them."""
    shape = make_shape(4)
    mean = mean_shape([make_subject(shape, seed, variation_mm=0.3) for seed in range(20)])
    fit = fit_similarity(mean, shape, np.ones(LANDMARKS))
    assert np.linalg.norm(fit.apply(mean) - shape, axis=1).mean() < 0.2


@pytest.mark.parametrize("stretch", [(1.6, 1.6, 1.6), (0.7, 1.0, 1.4), (1.0, 1.0, 1.0)])
def test_sizes_along_the_axes_are_measured_in_any_pose(stretch: tuple[float, ...]) -> None:
    source = np.random.default_rng(3).standard_normal((9, 3)) * (9.0, 5.0, 3.0)
    turned = Rotation.random(random_state=1).as_matrix()
    axes = np.linalg.svd(source - source.mean(axis=0))[2]
    target = ((source @ axes.T) * stretch) @ axes @ turned.T + 40.0
    np.testing.assert_allclose(measure_stretch(source, target, 1.0), sorted(stretch)[::-1])


def test_no_size_is_measured_along_an_axis_where_points_hardly_spread() -> None:
    source = np.random.default_rng(3).standard_normal((9, 3)) * (9.0, 5.0, 0.1)
    errors = np.random.default_rng(4).standard_normal((9, 3)) * (0.0, 0.0, 1.0)
    np.testing.assert_allclose(measure_stretch(source, source + errors, 2.0), 1.0, atol=0.1)
    assert measure_stretch(source, source + errors, 0.01)[0] > 3.0
    assert len(measure_stretch(source, source, 99.0)) == 0


def test_a_turn_about_the_long_axis_is_told_from_others() -> None:
    source = np.random.default_rng(3).standard_normal((9, 3)) * (1.0, 3.0, 30.0)
    axes = np.linalg.svd(source - source.mean(axis=0))[2]
    about_long = Rotation.from_rotvec(np.radians(-25.0) * axes[0])
    other = Rotation.from_rotvec(np.radians(60.0) * axes[1])
    assert measure_twist(source, other.apply(source)) == pytest.approx(0.0, abs=1e-6)
    assert measure_twist(source, about_long.apply(source)) == pytest.approx(25.0)
    assert measure_twist(source, (other * about_long).apply(source)) == pytest.approx(25.0)
    half = Rotation.from_rotvec(np.pi * axes[0])
    assert measure_twist(source, half.apply(source)) == pytest.approx(180.0)
