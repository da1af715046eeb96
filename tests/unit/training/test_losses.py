"""Targets and loss."""

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from app.training.data.mirror import mirror
from app.training.fit.augment import Sample, draw_sample
from app.training.fit.losses import make_targets, output_axis, vote_loss
from app.training.recipe import Augmentation
from tests.support.training_data import blob_specimen

SHAPE = (40, 48, 32)
SPACING = 0.9


def random_samples(rng: np.random.Generator) -> list[Sample]:
    samples = []
    for _ in range(2):
        points = rng.uniform(4, 28, (3, 3))
        points[1] = np.nan
        visible = torch.ones(SHAPE, dtype=torch.bool)
        visible[:, :, 20:] = False
        samples.append(Sample(torch.zeros(1, *SHAPE), points, visible))
    return samples


def without_second(samples: list[Sample]) -> list[Sample]:
    """Let the landmark that has no position be known to be absent."""
    return [replace(sample, absent=frozenset({1})) for sample in samples]


def test_loss_equals_its_dense_definition() -> None:
    rng = np.random.default_rng(0)
    samples = without_second(random_samples(rng))
    stride, radius = 2, 6.0
    field = torch.randn(2, 12, 20, 24, 16, requires_grad=True)
    targets = make_targets(samples, SPACING, stride, radius)
    score, offset = vote_loss(field, targets, radius / SPACING)

    axes = [output_axis(n, stride) for n in SHAPE]
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
    targets = make_targets(samples, SPACING, 2, 6.0)
    score, offset = vote_loss(field, targets, 6.0)
    torch.autograd.backward([score + offset])
    assert field.grad is not None
    assert field.grad[:, 1].abs().max() == 0
    assert field.grad[:, 0].abs().max() > 0


def test_absent_landmark_is_learned_as_such_where_others_are_unknown() -> None:
    one, other = random_samples(np.random.default_rng(0))
    samples = [one, *without_second([other])]
    field = torch.randn(2, 12, 20, 24, 16, requires_grad=True)
    targets = make_targets(samples, SPACING, 2, 6.0)
    score, offset = vote_loss(field, targets, 6.0)
    torch.autograd.backward([score + offset])
    assert field.grad is not None
    assert field.grad[0, 1].abs().max() == 0
    assert field.grad[1, 1].min() > 0


def test_landmark_without_a_partner_is_unknown_in_a_mirror_image_not_absent() -> None:
    """There, it lies where nobody has placed anything: on the other side."""
    blobs = blob_specimen(1)
    points = np.r_[blobs.points, np.full((1, 3), np.nan)]
    specimen = replace(blobs, points=points, absent=frozenset({3}))
    image = mirror(specimen, np.array([1, 0, -1, 3]))
    rng = np.random.default_rng(0)
    samples = [draw_sample(one, SHAPE, SPACING, Augmentation(), rng) for one in (specimen, image)]
    known = make_targets(samples, SPACING, 2, 6.0).known
    assert known.tolist() == [[True, True, True, True], [True, True, False, True]]
