"""Field -> votes in plain torch: what is computed, on any device.

``app.voting.cpu`` and ``app.voting.cuda`` compute the same faster. Almost nothing passes the
threshold, so voxels are first filtered by their best score, without exponentials. That test may let
too much through, never too little; only the last, on the probability in float32, decides.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from app.errors import NetworkFailed
from app.model import Field

FIXED_ONE: Final = 1 << 24
"""Fixed-point units of a weight of 1. Weights are summed as integers, which commute: so the order
of votes changes no bit. The unit is float32's resolution near 1; int64 holds 2^39 unit votes."""

Importance = tuple[Float[Tensor, " i"], Float[Tensor, " j"], Float[Tensor, " k"]]
"""How much a voxel counts: the product of one number per axis."""

Columns = tuple[Int64[Tensor, " votes"], Float32[Tensor, "8 votes"]]
"""Landmark of each vote; source (i j k), position (i j k), probability and weight."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a field lies in its grid, and how much its voxels count there.

    Field voxel u has its centre at grid index ``origin + (u + 0.5) * stride - 0.5``.

    Attributes:
        origin: Grid index of the first grid voxel that the field covers.
        stride: Grid voxels per field voxel.
        importance: How much a field voxel counts; None: 1 everywhere.
    """

    origin: tuple[int, int, int] = (0, 0, 0)
    stride: int = 1
    importance: Importance | None = None

    @property
    def first_centre(self) -> tuple[float, float, float]:
        """Grid index of the first field voxel's centre."""
        i, j, k = (index + 0.5 * self.stride - 0.5 for index in self.origin)
        return i, j, k


def filter_columns(field: Field, threshold: float, placement: Placement) -> Columns:
    """Collect the votes of a field; see ``app.voting.votes.filter_votes``.

    Returns:
        The votes, ordered by voxel (i, then j, then k), then by landmark.

    Raises:
        NetworkFailed: A score is not a number, or the softmax of some is none.
    """
    voxel, landmark, probability = _find_hits(field, threshold)
    columns = torch.empty(8, len(landmark), device=landmark.device)
    columns[6] = columns[7] = probability
    offsets = _read_offsets(field, landmark, voxel)
    for axis, (index, first) in enumerate(zip(voxel, placement.first_centre, strict=True)):
        columns[axis] = index.float() * placement.stride + first
        columns[3 + axis] = columns[axis] + offsets[axis] * field.offset_scale[axis]
        if placement.importance is not None:
            columns[7] *= placement.importance[axis][index]
    finite = columns[3:6].isfinite().all(0)
    return landmark[finite], columns[:, finite]


def _read_offsets(
    field: Field, landmark: Int64[Tensor, " n"], voxel: Int64[Tensor, "3 n"]
) -> Float32[Tensor, "3 n"]:
    """Read the offsets of some voxels, or compute them."""
    if field.layer is None:
        return field.offsets[:, landmark, *voxel].float()
    weight, features = field.layer.weight[:, landmark], field.layer.features[:, *voxel].float()
    return torch.einsum("anf,fn->an", weight, features) + field.layer.bias[:, landmark]


def _find_hits(
    field: Field, threshold: float
) -> tuple[Int64[Tensor, "3 n"], Int64[Tensor, " n"], Float32[Tensor, " n"]]:
    """Find the voxels and landmarks that pass, with their probability."""
    first, best = int(field.background), field.scores[int(field.background) :].amax(0)
    if field.activation == "softmax":
        best = best - field.scores[0]
    # Not "best >= limit", which is false for NaN: NaN has to be found.
    voxels = torch.nonzero((best < score_limit(field, threshold)).logical_not_()).T
    # In float64, as the last bit of a float32 exponential depends on its position in a vector.
    scores = field.scores[:, *voxels].double()
    if field.activation == "softmax":
        scores = torch.softmax(scores, dim=0)
    elif field.activation == "sigmoid":
        scores = torch.sigmoid(scores)
    probability = scores[first:].T.float()
    if bool(probability.isnan().any()):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    hit, landmark = torch.nonzero(probability >= threshold).unbind(1)
    return voxels[:, hit], landmark, probability[hit, landmark]


def score_limit(field: Field, threshold: float) -> float:
    """Compute a score that a landmark needs to pass; with softmax, over the background's score.

    A probability p beside the background's p0 has p / (p + p0) >= p, so with softmax, too, it
    passes only where its score exceeds the background's by logit(threshold). The limit is lowered
    by more than rounding in the scores' type and in the float32 probability can move it.
    """
    epsilon = max(torch.finfo(dtype).eps for dtype in (field.scores.dtype, torch.float32))
    if field.activation == "none":
        return threshold - 2 * epsilon * max(abs(threshold), epsilon)
    bounded = min(max(threshold, 1e-30), 1 - 1e-7)
    logit = math.log(bounded) - math.log1p(-bounded)
    return logit - 2 * epsilon * max(1.0, abs(logit)) - 4e-7 / (bounded * (1 - bounded))
