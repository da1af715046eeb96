"""Samples + output of the network -> loss."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from app.training.fit.augment import Sample


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of a batch; only the few voxels that should vote are listed.

    Attributes:
        index: Of every (image, landmark, output voxel) that should vote: positions in the scores of
            shape (n c i j k), flattened.
        owner: Its image and landmark: position in (n c), flattened.
        offsets: From its centre to the landmark, in image voxels.
        known: Whether it is known where, or that, a landmark is; others carry no loss.
    """

    index: Int64[Tensor, " votes"]
    owner: Int64[Tensor, " votes"]
    offsets: Float[Tensor, "votes 3"]
    known: Bool[Tensor, "n c"]

    def to(self, device: torch.device) -> "Targets":
        """Copy the targets to a device."""
        return Targets(*(getattr(self, one.name).to(device) for one in fields(self)))


def output_axis(size: int, stride: int) -> Float[Tensor, " u"]:
    """List the centres of output voxels along an axis, in image voxels: (u + 1/2) stride - 1/2."""
    return (torch.arange(size // stride) + 0.5) * stride - 0.5


def make_targets(
    samples: Sequence[Sample],
    spacing_mm: float,
    stride: int,
    radius_mm: float,
) -> Targets:
    """Compute the targets of a batch.

    Args:
        samples: Images with landmarks, all of one shape.
        spacing_mm: Spacing of the images, isotropic.
        stride: Image voxels per output voxel.
        radius_mm: Distance up to which a voxel votes.
    """
    shape = samples[0].image.shape[1:]
    points = torch.from_numpy(np.stack([sample.points for sample in samples])).float()
    offsets = [points[:, :, axis, None] - output_axis(shape[axis], stride) for axis in range(3)]
    square = [(offset * spacing_mm).square() for offset in offsets]
    distance = (
        square[0][..., :, None, None]
        + square[1][..., None, :, None]
        + square[2][..., None, None, :]
    )
    centre = slice(stride // 2, None, stride)
    visible = torch.stack([sample.visible[centre, centre, centre] for sample in samples])
    votes = torch.nonzero((distance <= radius_mm**2) & visible[:, None])
    image, landmark, *voxel = votes.T
    size = distance[0, 0].shape
    owner = image * points.shape[1] + landmark
    index = ((owner * size[0] + voxel[0]) * size[1] + voxel[1]) * size[2] + voxel[2]
    known = torch.isfinite(points).all(dim=2)
    for each, sample in zip(known, samples, strict=True):
        each[list(sample.absent)] = True
    return Targets(
        index=index,
        owner=owner,
        offsets=torch.stack(
            [offset[image, landmark, at] for offset, at in zip(offsets, voxel, strict=True)], dim=1
        ),
        known=known,
    )


def vote_loss(
    output: Float[Tensor, "n channels i j k"],
    targets: Targets,
    radius_voxels: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute the two losses of sigmoid scores and axis-major voxel offsets.

    Returns:
        The score loss (cross entropy summed over voxels per voxel that should vote, plus one minus
        the soft Dice overlap) and the offset loss (mean distance along each axis in radii, over the
        voxels that should vote).
    """
    images, landmarks = targets.known.shape
    # Split once: the gradient of each slice would be as large as the output.
    scores, offsets = output.split([landmarks, 3 * landmarks], dim=1)
    scores = scores.float().contiguous()
    known = targets.known.to(scores.dtype)
    votes = max(len(targets.index), 1)
    score = scores.flatten()[targets.index]
    entropy = (functional.softplus(scores).sum((2, 3, 4)) * known).sum() - score.sum()
    zeros = torch.zeros(images * landmarks, dtype=scores.dtype, device=output.device)
    overlap = zeros.index_add(0, targets.owner, score.sigmoid())
    truth = zeros.index_add(0, targets.owner, torch.ones_like(score))
    size = scores.sigmoid().sum((2, 3, 4)).flatten() + truth
    present = (truth > 0).to(scores.dtype)
    dice = 1 - ((2 * overlap + 1) / (size + 1) * present).sum() / present.sum().clamp_min(1.0)
    image, landmark = targets.owner // landmarks, targets.owner % landmarks
    voxel = targets.index % scores[0, 0].numel()
    axis = torch.arange(3, device=output.device)[:, None]
    predicted = offsets.flatten(2)[image, landmarks * axis + landmark, voxel].float().T
    error = (predicted - targets.offsets).abs().sum()
    return entropy / votes + dice, error / (3 * votes * radius_voxels)
