"""Field -> Survivors: the voxels and landmarks whose probability reaches the threshold.

This is the plain way, for any device; compiled kernels (``app.voting.cpu.plan``) do the same
faster. Almost nothing passes, so almost nothing is done for a voxel that does not: its best score
says, by a test without exponentials, whether anything at it can pass. In doubt, a test lets
something
through: only the last one, on the probability, decides.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from app.errors import NetworkFailed
from app.model import Field
from app.voting.indices import true_indices

BLOCK_BYTES: Final = 1 << 28
"""Scores looked at at once: enough to fill a device, far below nonzero's 2^31 elements."""

Profiles = tuple[Float[Tensor, " i"], Float[Tensor, " j"], Float[Tensor, " k"]]
"""What a voxel counts, along each axis."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """What passes, ordered by voxel (i, then j, then k), then by landmark.

    Attributes:
        row: Which row of voxels along k: i times the field's size along j, plus j.
        k: Which voxel of the row.
        landmark: Which landmark.
        probability: Its probability there, float32.
    """

    row: Int64[Tensor, " n"]
    k: Int64[Tensor, " n"]
    landmark: Int64[Tensor, " n"]
    probability: Float[Tensor, " n"]


def collect(field: Field, threshold: float) -> Survivors:
    """Find every voxel and landmark whose probability is at least the threshold.

    Args:
        field: Scores of one tile, or of one array, in any memory layout.
        threshold: Least probability, compared in float32.

    Returns:
        What passes.

    Raises:
        NetworkFailed: A score is not a number, or softmax scores are infinite.
    """
    slice_bytes = field.scores[:, :1].numel() * field.scores.element_size()
    thickness = max(1, BLOCK_BYTES // max(1, slice_bytes))
    parts = [
        _survivors(field, slice(first, first + thickness), threshold)
        for first in range(0, field.scores.shape[1], thickness)
    ]
    row, k, landmark, probability = (torch.cat(column) for column in zip(*parts, strict=True))
    found = Survivors(row, k, landmark, probability)
    passes = probability >= threshold
    if bool(passes.all()):
        return found
    if bool(probability.isnan().any()):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    return _select(found, true_indices(passes))


def _survivors(
    field: Field, slices: slice, threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find what may pass in some slices, NaN included: row, k, landmark and probability."""
    block, lead = field.scores[:, slices], int(field.background)
    limit = score_limit(field, threshold)
    best = block[lead:].amax(0)
    if field.activation == "softmax":
        best = best - block[0]
    # Not "best >= limit": a NaN fails every comparison, so this way it is kept, and found.
    i, j, k = torch.nonzero((best < limit).logical_not_()).unbind(1)
    scores = block.permute(1, 2, 3, 0)[i, j, k].double()
    # In float64, as the last bit of a float32 exponential depends on its place in a vector.
    if field.activation == "softmax":
        scores, limit = torch.softmax(scores, dim=1).float(), threshold
    scores = scores[:, lead:]
    voxel, landmark = torch.nonzero((scores < limit).logical_not_()).unbind(1)
    probability = scores[voxel, landmark]
    if field.activation == "sigmoid":
        probability = torch.sigmoid(probability)
    row = (i + slices.start) * field.scores.shape[2] + j
    return row[voxel], k[voxel], landmark, probability.float()


def _select(found: Survivors, kept: Int64[Tensor, " kept"]) -> Survivors:
    return Survivors(
        row=found.row.index_select(0, kept),
        k=found.k.index_select(0, kept),
        landmark=found.landmark.index_select(0, kept),
        probability=found.probability.index_select(0, kept),
    )


def score_limit(field: Field, threshold: float) -> float:
    """Say which score a landmark surely needs to pass: absolute, or over the background in softmax.

    A probability p over the background's p0 has p / (p + p0) >= p, so in softmax, too, it passes
    only where its score exceeds the background's by logit(threshold). The limit is lowered by more
    than what rounding in the scores' type and in the float32 probability can move it.
    """
    epsilon = torch.finfo(field.scores.dtype).eps
    if field.activation == "none":
        return threshold - 2 * epsilon * max(abs(threshold), epsilon)
    bounded = min(max(threshold, 1e-30), 1 - 1e-7)
    logit = math.log(bounded) - math.log1p(-bounded)
    return logit - 2 * epsilon * max(1.0, abs(logit)) - 4e-7 / (bounded * (1 - bounded))
