"""Posing, targets and loss: the picture and its landmarks must stay together."""

import numpy as np
import torch
from torch.nn import functional

from app.geometry import transform
from app.preprocessing.posed_grid import index_grid
from app.training.data.specimens import Specimen
from app.training.fit.augment import Augmentation, Sample, pose, warp_at, warp_grid
from app.training.fit.losses import field_axis, make_targets, vote_loss
from app.training.recipe import Recipe, suggest_spacing
from tests.unit.preprocessing.test_grid import oblique_affine

SHAPE = (40, 48, 32)
SPACING = 0.9


def blob_specimen(seed: int) -> Specimen:
    """Make a scan with one bright blob at each landmark, far apart."""
    affine = oblique_affine(seed)
    affine[:3, :3] *= 0.5 / np.abs(np.linalg.det(affine[:3, :3])) ** (1 / 3)
    index = np.stack(np.meshgrid(*[np.arange(n) for n in (50, 60, 55)], indexing="ij"), axis=-1)
    world = transform(affine, index.astype(np.float64))
    points = transform(affine, np.array([[20.0, 25, 20], [30, 40, 35], [33, 20, 30]]))
    voxels = sum(np.exp(-0.5 * ((world - point) ** 2).sum(-1) / 1.2**2) for point in points)
    return Specimen("blobs", torch.from_numpy(voxels).float(), affine, points)


def centroid_near(image: torch.Tensor, point: np.ndarray, radius: float) -> np.ndarray:
    index = np.stack(np.meshgrid(*[np.arange(n) for n in image.shape], indexing="ij"), axis=-1)
    near = ((index - point) ** 2).sum(-1) <= radius**2
    weights = image.numpy() * near
    return np.asarray((index * weights[..., None]).sum((0, 1, 2)) / weights.sum())


def test_posed_landmarks_lie_where_the_posed_image_shows_them() -> None:
    plain = Augmentation(crop=0.0, elastic_mm=0.4, shift_mm=0.5)
    rng = np.random.default_rng(1)
    for seed in range(6):
        sample = pose(blob_specimen(seed), SHAPE, SPACING, plain, rng)
        image = (sample.image[0] - sample.image.median()).clamp_min(0)
        for point in sample.points:
            if (point > 5).all() and (point < np.array(SHAPE) - 6).all():
                for _ in range(3):
                    found = centroid_near(image, point, 4.0)
                np.testing.assert_allclose(found, point, atol=0.35)


def test_warp_of_all_voxels_is_that_of_each() -> None:
    knots = np.random.default_rng(2).standard_normal((5, 4, 6, 3))
    grid = index_grid(SHAPE, np.eye(4))
    torch.testing.assert_close(
        warp_grid(knots, SHAPE), warp_at(grid, knots, SHAPE), rtol=0, atol=1e-5
    )


def test_same_seed_gives_the_same_pose() -> None:
    specimen = blob_specimen(3)
    first, second = (
        pose(specimen, SHAPE, SPACING, Augmentation(), np.random.default_rng([4, 2]))
        for _ in range(2)
    )
    assert torch.equal(first.image, second.image)
    np.testing.assert_array_equal(first.points, second.points)


def random_samples(rng: np.random.Generator) -> list[Sample]:
    samples = []
    for _ in range(2):
        points = rng.uniform(4, 28, (3, 3))
        points[1] = np.nan
        visible = torch.ones(SHAPE, dtype=torch.bool)
        visible[:, :, 20:] = False
        samples.append(Sample(torch.zeros(1, *SHAPE), points, visible))
    return samples


def test_loss_equals_its_dense_definition() -> None:
    rng = np.random.default_rng(0)
    samples = random_samples(rng)
    stride, radius = 2, 6.0
    field = torch.randn(2, 12, 20, 24, 16, requires_grad=True)
    targets = make_targets(samples, SPACING, stride, radius, missing_is_absent=True)
    score, offset = vote_loss(field, targets, radius / SPACING)

    axes = [field_axis(n, stride) for n in SHAPE]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    points = torch.tensor(np.stack([sample.points for sample in samples])).float()
    wanted = points[:, :, None, None, None] - centres
    seen = samples[0].visible[1::2, 1::2, 1::2]
    inside = ((wanted * SPACING).square().sum(-1) <= radius**2) & seen
    truth = inside.float()
    entropy = functional.binary_cross_entropy_with_logits(field[:, :3], truth, reduction="sum")
    probability = field[:, :3].sigmoid()
    dice = (2 * (probability * truth).sum((2, 3, 4)) + 1) / (
        probability.sum((2, 3, 4)) + truth.sum((2, 3, 4)) + 1
    )
    present = truth.sum((2, 3, 4)) > 0
    expected = entropy / truth.sum() + 1 - dice[present].mean()
    torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-4)

    given = field[:, 3:].unflatten(1, (3, 3)).permute(0, 2, 3, 4, 5, 1)
    distance = (given - wanted).abs()[inside].mean() / (radius / SPACING)
    torch.testing.assert_close(offset, distance, rtol=1e-4, atol=1e-5)


def test_unknown_landmark_carries_no_loss() -> None:
    samples = random_samples(np.random.default_rng(0))
    field = torch.randn(2, 12, 20, 24, 16, requires_grad=True)
    targets = make_targets(samples, SPACING, 2, 6.0, missing_is_absent=False)
    score, offset = vote_loss(field, targets, 6.0)
    torch.autograd.backward([score + offset])
    assert field.grad is not None
    assert field.grad[:, 1].abs().max() == 0
    assert field.grad[:, 0].abs().max() > 0


def test_landmarks_fit_the_image_at_the_suggested_spacing() -> None:
    points = np.array([[0.0, 0, 0], [10, 0, 0], [0, 20, 0], [np.nan] * 3])
    spacing = suggest_spacing([points, points])
    assert spacing * 64 >= np.hypot(10, 20)
    assert spacing == 0.36


def test_whole_grid_network_is_trained_on_shapes_that_its_divisor_divides() -> None:
    recipe = Recipe(spacing_mm=1.0, radius_mm=5.0)
    for shape in recipe.image_shapes():
        assert all(edge % recipe.divisor == 0 for edge in shape)
        assert abs(np.prod(shape) / 64**3 - 1) < 0.2
