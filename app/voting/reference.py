"""Field -> Hits: the voxels and landmarks whose probability reaches the threshold, in plain torch.

This runs on any device and defines the result; ``app.voting.cpu`` and ``app.voting.cuda`` compute
the same faster. Almost nothing passes the threshold, so voxels are first filtered by their best
score, without exponentials. Such a test on scores may let too much through, never too little; only
the last test, on the probability, decides.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from app.errors import NetworkFailed
from app.model import Field

BLOCK_BYTES: Final = 1 << 28
"""Scores tested at once: enough to fill a device, far below nonzero's 2^31 elements."""

FIXED_ONE: Final = 1 << 24
"""Fixed-point units of a weight of 1. Weights are summed as integers, which commute: so the order
of votes changes no bit. The unit is float32's resolution near 1; int64 holds 2^39 unit votes."""

Importance = tuple[Float[Tensor, " i"], Float[Tensor, " j"], Float[Tensor, " k"]]
"""How much a voxel counts: the product of one number per axis."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Voxels and landmarks that pass, ordered by voxel (i, then j, then k), then by landmark.

    Attributes:
        row: Row of voxels along k: i times the field's size along j, plus j.
        k: Voxel of the row.
        landmark: Landmark.
        probability: Its probability there, float32.
    """

    row: Int64[Tensor, " n"]
    k: Int64[Tensor, " n"]
    landmark: Int64[Tensor, " n"]
    probability: Float[Tensor, " n"]


def find_hits(field: Field, threshold: float) -> Hits:
    """Find every voxel and landmark whose probability is at least the threshold.

    Args:
        field: Scores of one tile, or of one array, in any memory layout.
        threshold: Least probability, compared in float32.

    Returns:
        The hits.

    Raises:
        NetworkFailed: A score is not a number, or softmax scores are infinite.
    """
    slice_bytes = field.scores[:, :1].numel() * field.scores.element_size()
    thickness = max(1, BLOCK_BYTES // max(1, slice_bytes))
    parts = [
        _candidates(field, slice(first, first + thickness), threshold)
        for first in range(0, field.scores.shape[1], thickness)
    ]
    row, k, landmark, probability = (torch.cat(column) for column in zip(*parts, strict=True))
    passes = probability >= threshold
    if bool(passes.all()):
        return Hits(row, k, landmark, probability)
    if bool(probability.isnan().any()):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    kept = true_indices(passes)
    return Hits(*(part.index_select(0, kept) for part in (row, k, landmark, probability)))


def _candidates(
    field: Field, slices: slice, threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find what may pass in some slices, NaN included: row, k, landmark and probability."""
    block, first = field.scores[:, slices], int(field.background)
    limit = score_limit(field, threshold)
    best = block[first:].amax(0)
    if field.activation == "softmax":
        best = best - block[0]
    # Not "best >= limit", which is false for NaN: NaN has to be found.
    i, j, k = torch.nonzero((best < limit).logical_not_()).unbind(1)
    scores = block.permute(1, 2, 3, 0)[i, j, k].double()
    # In float64, as the last bit of a float32 exponential depends on its position in a vector.
    if field.activation == "softmax":
        scores, limit = torch.softmax(scores, dim=1).float(), threshold
    scores = scores[:, first:]
    voxel, landmark = torch.nonzero((scores < limit).logical_not_()).unbind(1)
    probability = scores[voxel, landmark]
    if field.activation == "sigmoid":
        probability = torch.sigmoid(probability)
    row = (i + slices.start) * field.scores.shape[2] + j
    return row[voxel], k[voxel], landmark, probability.float()


def score_limit(field: Field, threshold: float) -> float:
    """Compute a score that a landmark needs to pass; with softmax, over the background's score.

    A probability p beside the background's p0 has p / (p + p0) >= p, so with softmax, too, it
    passes only where its score exceeds the background's by logit(threshold). The limit is lowered
    by more than rounding in the scores' type and in the float32 probability can move it.
    """
    epsilon = torch.finfo(field.scores.dtype).eps
    if field.activation == "none":
        return threshold - 2 * epsilon * max(abs(threshold), epsilon)
    bounded = min(max(threshold, 1e-30), 1 - 1e-7)
    logit = math.log(bounded) - math.log1p(-bounded)
    return logit - 2 * epsilon * max(1.0, abs(logit)) - 4e-7 / (bounded * (1 - bounded))


def true_indices(mask: Bool[Tensor, " n"]) -> Int64[Tensor, " found"]:
    """List the indices of the true elements, in order."""
    if mask.device.type == "cpu":  # Several times faster than torch.
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero(mask)[:, 0]


def to_fixed(weight: Float[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Round weights to whole fixed-point units."""
    return (weight * FIXED_ONE).round_().long()
