"""Random samples: the image and its landmarks must stay together."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.preprocessing.posed_grid import index_grid
from app.training.fit.augment import (
    MAX_NOISE,
    change_contrast,
    degrade,
    draw_sample,
    interpolate_at,
    interpolate_grid,
    invert_deformation,
    reflect,
)
from app.training.recipe import Augmentation
from tests.support.training_data import blob_specimen

SHAPE = (40, 48, 32)
SPACING = 0.9


def centroid_near(image: torch.Tensor, point: np.ndarray, radius: float) -> np.ndarray:
    index = np.stack(np.meshgrid(*[np.arange(n) for n in image.shape], indexing="ij"), axis=-1)
    near = ((index - point) ** 2).sum(-1) <= radius**2
    weights = image.numpy() * near
    return np.asarray((index * weights[..., None]).sum((0, 1, 2)) / weights.sum())


def test_landmarks_lie_where_the_image_shows_them() -> None:
    plain = Augmentation(crop=0.0, elastic_mm=0.4, shift_mm=0.5)
    rng = np.random.default_rng(1)
    for seed in range(6):
        sample = draw_sample(blob_specimen(seed), SHAPE, SPACING, plain, rng)
        image = (sample.image[0] - sample.image.median()).clamp_min(0)
        for point in sample.points:
            if (point > 5).all() and (point < np.array(SHAPE) - 6).all():
                for _ in range(3):
                    found = centroid_near(image, point, 4.0)
                np.testing.assert_allclose(found, point, atol=0.35)


def test_deformation_of_all_voxels_is_that_of_each() -> None:
    knots = np.random.default_rng(2).standard_normal((5, 4, 6, 3))
    grid = index_grid(SHAPE, np.eye(4))
    torch.testing.assert_close(
        interpolate_grid(knots, SHAPE), interpolate_at(grid, knots, SHAPE), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(("elastic_voxels", "fewest", "most"), [(0.36, 1, 1), (4, 0.7, 0.95)])
def test_no_landmark_is_put_where_a_deformed_image_does_not_show_it(
    elastic_voxels: float, fewest: float, most: float
) -> None:
    """Where a deformation folds the image, it is unknown."""
    random = np.random.default_rng(6)
    points, kept = random.uniform(0, SHAPE, (200, 3)), []
    for _ in range(5):
        knots = elastic_voxels * random.standard_normal((5, 5, 5, 3))
        found = invert_deformation(points, knots, SHAPE)
        known = np.isfinite(found).all(axis=1)
        shown = torch.from_numpy(found[known]).float()
        shown = shown + interpolate_at(shown, knots, SHAPE)
        assert np.linalg.norm(shown.numpy() - points[known], axis=1).max() < 0.6
        kept.append(known.mean())
    assert fewest <= np.mean(kept) <= most


def test_same_seed_gives_the_same_sample() -> None:
    specimen = blob_specimen(3)
    first, second = (
        draw_sample(specimen, SHAPE, SPACING, Augmentation(), np.random.default_rng([4, 2]))
        for _ in range(2)
    )
    assert torch.equal(first.image, second.image)
    np.testing.assert_array_equal(first.points, second.points)


def test_the_image_is_exactly_zero_outside_the_scan_and_where_it_is_blanked() -> None:
    """As the service samples it; noise and brightness are only within the scan."""
    specimen = replace(blob_specimen(3), voxels=torch.full((50, 60, 55), 0.5))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        sample = draw_sample(specimen, (70, 64, 72), SPACING, Augmentation(crop=1.0), rng)
        image = sample.image[0]
        inside = image != 0
        assert 0.05 < inside.float().mean() < 0.95
        assert not image[~sample.visible].any()
        assert image[inside].std() > 0
        # A corner of the image is farther from the scan than any of its voxels.
        assert not any(image[i, j, k] for i in (0, -1) for j in (0, -1) for k in (0, -1))


def test_image_of_a_scan_without_landmarks_shows_a_part_of_it() -> None:
    """A mirror image has none if none has a partner; the middle of none is no place."""
    blobs = blob_specimen(1)
    bare = replace(blobs, points=np.full_like(blobs.points, np.nan))
    sample = draw_sample(bare, (16, 16, 16), SPACING, Augmentation(), np.random.default_rng(0))
    assert sample.image.abs().max() > 0
    assert np.isnan(sample.points).all()


def test_a_reflected_scan_goes_on_beyond_its_border() -> None:
    index = torch.tensor([[-2.0, 0.5, 0.0], [3.0, 4.5, 0.0], [5.5, 11.0, 0.0]])[None, None]
    folded = reflect(index, (4, 5, 1))
    expected = torch.tensor([[2.0, 0.5, 0.0], [3.0, 3.5, 0.0], [0.5, 3.0, 0.0]])[None, None]
    torch.testing.assert_close(folded, expected)
    specimen = replace(blob_specimen(3), voxels=torch.full((50, 60, 55), 0.5))
    everywhere = Augmentation(crop=0.0, reflect=1.0, shift_mm=9.0)
    sample = draw_sample(specimen, (70, 64, 72), SPACING, everywhere, np.random.default_rng(1))
    assert (sample.image != 0).all()


def test_reflection_of_a_single_slice_is_that_slice() -> None:
    index = torch.tensor([[[[-1.4, 5.0, 9.5], [0.3, 5.0, 5.0], [0.9, 5.0, -0.5]]]])
    folded = torch.tensor([[[[0.0, 5.0, 6.5], [0.0, 5.0, 5.0], [0.0, 5.0, 0.5]]]])
    torch.testing.assert_close(reflect(index, (1, 9, 9)), folded)


def test_another_contrast_keeps_air_dark_and_changes_the_rest() -> None:
    ramp = torch.linspace(-0.1, 1.2, 24 * 8 * 8).reshape(24, 8, 8)
    changed = [change_contrast(ramp, np.random.default_rng(seed)) for seed in range(8)]
    assert all((image[ramp <= 0] == 0).all() for image in changed)
    assert all(image.isfinite().all() and image.min() >= 0 for image in changed)
    # Some curves make the brightest values darker than the middle ones.
    assert {bool(image[-1].mean() < image[12].mean()) for image in changed} == {True, False}


def test_worse_images_are_blurred_and_noisy_and_show_the_same_in_the_same_place() -> None:
    image = torch.zeros(40, 32, 24)
    image[10:30, 8:24, 6:18] = 1.0
    worse = [degrade(image, np.random.default_rng(seed)) for seed in range(64)]
    assert all(one.min() >= 0 and one.max() <= 1 and one.isfinite().all() for one in worse)
    apart = torch.tensor([one[image == 1].mean() - one[image == 0].mean() for one in worse])
    assert apart.min() > 0.1
    assert apart.max() > 0.9
    within = torch.tensor([one[16:24, 12:20, 9:15].std() for one in worse])
    assert within.min() < 0.01
    assert 0.2 < within.max() < MAX_NOISE
    edge = torch.tensor([(one[9:11].mean((1, 2)).diff()).abs().item() for one in worse])
    assert edge.min() < 0.05  # Blurred, where 0.25 is sharp.
    assert edge.max() > 0.24


def test_without_elastic_deformation_points_move_with_the_affine_alone() -> None:
    specimen = blob_specimen(2)
    plain = Augmentation(rotation_deg=0.0, scale=0.0, stretch=0.0, crop=0.0)
    sample = draw_sample(specimen, SHAPE, SPACING, plain, np.random.default_rng(0))
    centre = np.nanmean(specimen.points, axis=0)
    expected = (specimen.points - centre) / SPACING + (np.array(SHAPE) - 1) / 2
    np.testing.assert_allclose(sample.points, expected, atol=1e-4)
