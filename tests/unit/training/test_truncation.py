"""Samples of scans that end among the landmarks."""

import numpy as np
import pytest
import torch

from app.training.fit.augment import Sample
from app.training.fit.loop import draw_batches, truncate_batch
from app.training.fit.truncation import KEPT_SHARE, draw_axis, draw_normal, trim, truncate
from app.training.recipe import Recipe
from tests.support.training_data import blob_specimen

SPACING = 0.9
SHAPE = (40, 32, 48)
COUNT = 60


def make_sample(seed: int) -> Sample:
    """Make a sample whose values say where they are, with landmarks all over it."""
    random = np.random.default_rng(seed)
    points = random.uniform(4, np.array(SHAPE) - 5, (COUNT, 3))
    points[7] = np.nan
    image = torch.linspace(0.1, 0.6, int(np.prod(SHAPE))).reshape(1, *SHAPE)
    return Sample(image, points, torch.ones(SHAPE, dtype=torch.bool))


def seen(sample: Sample) -> np.ndarray:
    """Say which landmarks lie in a visible voxel."""
    index = np.rint(np.nan_to_num(sample.points, nan=-1.0)).astype(int)
    inside = ((index >= 0) & (index < np.array(sample.visible.shape))).all(axis=1)
    index[~inside] = 0
    return np.asarray(sample.visible.numpy()[tuple(index.T)] & inside)


@pytest.mark.parametrize("along_axes", [True, False])
def test_truncation_keeps_some_of_the_landmarks_and_nothing_beyond_the_plane(
    along_axes: bool,
) -> None:
    random = np.random.default_rng(2)
    sides = set()
    for seed in range(20):
        sample = make_sample(seed)
        normal = draw_axis([sample], random) if along_axes else draw_normal(random)
        assert np.linalg.norm(normal) == pytest.approx(1.0)
        cut = truncate(sample, normal, random)
        assert KEPT_SHARE[0] - 0.1 <= seen(cut).mean() <= KEPT_SHARE[1] + 0.1
        assert not cut.image[0][~cut.visible].any()
        assert bool((cut.image[0][cut.visible] > 0).all())
        assert float(cut.image.max()) <= 1.0
        np.testing.assert_array_equal(cut.points, sample.points)
        sides.add(bool(cut.visible[0, 0, 0]))
    assert sides == {True, False}


def test_what_is_left_keeps_its_values_up_to_their_brightness() -> None:
    sample = make_sample(1)
    cut = truncate(sample, np.array([0.0, 1.0, 0.0]), np.random.default_rng(3))
    ratio = (cut.image / sample.image)[0][cut.visible & (cut.image[0] < 1)]
    assert float(ratio.std()) < 1e-5
    assert np.exp(-0.2) <= float(ratio.mean()) <= np.exp(0.35)


def test_a_sample_without_landmarks_is_not_truncated() -> None:
    empty = Sample(torch.ones(1, *SHAPE), np.full((3, 3), np.nan), torch.ones(SHAPE).bool())
    assert truncate(empty, np.array([1.0, 0, 0]), np.random.default_rng(0)) is empty


def test_trimmed_samples_have_one_shape_and_keep_all_visible_voxels() -> None:
    random = np.random.default_rng(5)
    for seed in range(10):
        normal = draw_axis([make_sample(seed)], random)
        cut = [truncate(make_sample(n), normal, random) for n in (seed, seed + 100)]
        trimmed = trim(cut, 8)
        shapes = {tuple(sample.image.shape[1:]) for sample in trimmed}
        assert len(shapes) == 1
        assert all(edge % 8 == 0 for edge in shapes.pop())
        for before, after in zip(cut, trimmed, strict=True):
            assert after.visible.sum() == before.visible.sum()
            assert float(after.image.sum()) == pytest.approx(float(before.image.sum()))
            shift = (before.points - after.points)[0].astype(int)
            place = torch.nonzero(after.visible)[0].numpy()
            old = before.image[(0, *(place + shift))]
            assert float(after.image[(0, *place)]) == float(old)
            np.testing.assert_array_equal(seen(after), seen(before))


def test_a_network_that_sees_scans_whole_gets_smaller_images_of_truncated_ones() -> None:
    """As in service; the posed frame of a second network stays as it is."""
    random = np.random.default_rng(1)
    samples = [make_sample(1), make_sample(2)]
    whole = Recipe(spacing_mm=1.0, radius_mm=5.0, filters=(8, 8, 8))
    posed = Recipe(spacing_mm=1.0, radius_mm=5.0, filters=(8, 8, 8), sees="posed")
    assert whole.divisor == 8
    sizes = [np.prod(truncate_batch(samples, whole, random)[0].visible.shape) for _ in range(6)]
    assert min(sizes) < np.prod(SHAPE)
    assert truncate_batch(samples, posed, random)[0].visible.shape == SHAPE


def test_batches_are_truncated_as_often_as_asked_and_depend_on_the_seed_alone() -> None:
    recipe = Recipe(
        spacing_mm=SPACING, radius_mm=4.0, tile_shape=(32, 32, 48), steps=6, cuts=0.5, sees="posed"
    )
    specimens = [blob_specimen(1), blob_specimen(2)]
    first, second = (list(draw_batches(recipe, specimens, 0)) for _ in range(2))
    whole = [all(bool(sample.visible.all()) for sample in samples) for _, samples in first]
    assert 0 < sum(whole) < 6
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert torch.equal(one[0].image, other[0].image)


def test_scans_are_cut_where_the_landmarks_lie() -> None:
    """A spine is cut between its vertebrae, and hardly ever lengthwise."""
    points = np.zeros((COUNT, 3))
    points[:, 2] = np.linspace(0, 40, COUNT)
    spine = Sample(torch.ones(1, *SHAPE), points, torch.ones(SHAPE).bool())
    random = np.random.default_rng(1)
    axes = np.sum([draw_axis([spine, spine], random) for _ in range(400)], axis=0)
    assert axes[2] > 350
    assert axes[:2].min() > 0
