"""Field -> Votes: keep what passes the threshold, and nothing else.

A field is read once, in blocks that fit a cache. In each block the best landmark score of a voxel
says whether the voxel can hold a vote at all, by a test that needs no exponential; only voxels that
can are gathered, only there are probabilities computed, and offsets are read for survivors alone.

The rows of ``filter_votes`` are ordered by voxel (i, then j, then k), then by landmark, whatever
the memory layout and the size of the blocks. Nothing downstream depends on the order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from app.errors import NetworkFailed
from app.network import Field

BLOCK_BYTES: Final = 1 << 20
"""Scores looked at at once on a CPU: about the size of a core's second-level cache."""

DEVICE_BLOCK_BYTES: Final = 1 << 28
"""The same on an accelerator: large enough to fill it, far below nonzero's 2^31 elements."""

_Found = tuple[Int64[Tensor, "n 3"], Int64[Tensor, " n"], Float[Tensor, " n"]]
"""Voxel, landmark and probability of what passes."""

Profiles = tuple[Float[Tensor, " i"], Float[Tensor, " j"], Float[Tensor, " k"]]


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes of one or more tiles, one row each, on the device; positions in grid voxels (i j k).

    Attributes:
        landmark: Which landmark the vote is for.
        source: Centre of the field voxel that casts the vote.
        position: Where it says the landmark is; may lie outside the grid.
        probability: Probability of the landmark at the source.
        weight: Probability times the tile's importance at the source.
    """

    landmark: Int64[Tensor, " votes"]
    source: Float[Tensor, "votes 3"]
    position: Float[Tensor, "votes 3"]
    probability: Float[Tensor, " votes"]
    weight: Float[Tensor, " votes"]

    def __len__(self) -> int:
        """Count the votes."""
        return len(self.landmark)


def filter_votes(
    field: Field,
    threshold: float,
    *,
    stride: int = 1,
    origin: Sequence[int] = (0, 0, 0),
    importance: Profiles | None = None,
) -> Votes:
    """Collect the votes of a field: every voxel and landmark that reaches the threshold.

    Field voxel u has its centre at grid index ``origin + (u + 0.5) * stride - 0.5``. A vote whose
    position is not finite is dropped; one outside the grid is kept.

    Args:
        field: Scores and offsets of one tile, or of one array.
        threshold: Least probability of a vote, compared in float32.
        stride: Grid voxels per field voxel.
        origin: Grid index of the tile's first voxel.
        importance: What a field voxel counts, as one profile per axis; None: 1 everywhere.

    Returns:
        The votes, ordered by voxel, then landmark.

    Raises:
        NetworkFailed: A score is not a number, or softmax scores are infinite.
    """
    voxels, landmarks, probabilities = _collect(field, threshold)
    i, j, k = voxels.unbind(1)
    device = voxels.device
    shift = torch.tensor([o + 0.5 * stride - 0.5 for o in origin], device=device)
    scale = torch.tensor(field.offset_scale, device=device)
    source = voxels * float(stride) + shift
    offsets = field.offsets.permute(2, 3, 4, 1, 0)[i, j, k, landmarks].float()
    weight = probabilities
    if importance is not None:
        weight = weight * (importance[0][i] * importance[1][j] * importance[2][k])
    votes = Votes(landmarks, source, source + offsets * scale, probabilities, weight)
    finite = votes.position.isfinite().all(1)
    return votes if bool(finite.all()) else select_votes(votes, finite)


def concat_votes(parts: Sequence[Votes]) -> Votes:
    """Join the votes of several tiles, in the order given; nothing gives no votes, on the CPU."""
    if not parts:
        return empty_votes(torch.device("cpu"))
    return Votes(
        landmark=torch.cat([part.landmark for part in parts]),
        source=torch.cat([part.source for part in parts]),
        position=torch.cat([part.position for part in parts]),
        probability=torch.cat([part.probability for part in parts]),
        weight=torch.cat([part.weight for part in parts]),
    )


def select_votes(votes: Votes, rows: Bool[Tensor, " votes"] | Int64[Tensor, " rows"]) -> Votes:
    """Take some of the votes, by a mask or by row numbers."""
    return Votes(
        landmark=votes.landmark[rows],
        source=votes.source[rows],
        position=votes.position[rows],
        probability=votes.probability[rows],
        weight=votes.weight[rows],
    )


def empty_votes(device: torch.device) -> Votes:
    """Make no votes at all, on a device."""
    none = torch.zeros(0, device=device)
    points = torch.zeros(0, 3, device=device)
    return Votes(none.long(), points, points, none, none)


def vote_rows(votes: Votes, sample_shape: Sequence[int]) -> Float[Tensor, "rows 5"]:
    """List votes as rows ``landmark, probability, i, j, k``: the filter of the known case P1.

    Args:
        votes: Votes of one array, positions in its voxels.
        sample_shape: Part of the array that counts; a position p is kept if 0 <= p < sample_shape
            on every axis.

    Returns:
        One row per vote kept, in the order of ``votes``: that of ``filter_votes`` is by voxel (i,
        then j, then k), then by landmark.
    """
    end = torch.tensor(sample_shape, device=votes.position.device)
    kept = ((votes.position >= 0) & (votes.position < end)).all(1)
    columns = (votes.landmark[kept, None], votes.probability[kept, None], votes.position[kept])
    return torch.cat([column.float() for column in columns], dim=1)


def _collect(field: Field, threshold: float) -> _Found:
    """Find voxel, landmark and probability of everything that passes."""
    if field.activation == "softmax" and not field.background:
        raise ValueError("expected a background channel with softmax, got none")
    device = field.scores.device
    slice_bytes = field.scores[:, :1].numel() * field.scores.element_size()
    thickness = max(1, _block_bytes(device) // max(1, slice_bytes))
    found = [
        _survivors(field, first, first + thickness, threshold)
        for first in range(0, field.scores.shape[1], thickness)
    ]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    parts = [part for part in found if part is not None] or [(none.view(0, 3), none, none.float())]
    voxels, landmarks, probabilities = (torch.cat(column) for column in zip(*parts, strict=True))
    if bool(probabilities.isnan().any()):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    kept = probabilities >= threshold
    return voxels[kept], landmarks[kept], probabilities[kept]


def _block_bytes(device: torch.device) -> int:
    return BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES


def _survivors(field: Field, first: int, last: int, threshold: float) -> _Found | None:
    """Find what may pass in a block of slices, NaN included: rather too much than too little."""
    lead = int(field.background)
    block = field.scores[:, first:last]
    limit = _score_limit(field, threshold)
    best = block[lead:].amax(0)
    if field.activation == "softmax":
        best = best - block[0]
    # Not "best >= limit": a NaN fails every comparison, so this way it is kept, and found.
    voxels = torch.nonzero((best < limit).logical_not_())
    if len(voxels) == 0:
        return None
    i, j, k = voxels.unbind(1)
    scores = block.permute(1, 2, 3, 0)[i, j, k].float()
    if field.activation == "softmax":
        scores, limit = torch.softmax(scores, dim=1), threshold
    scores = scores[:, lead:]
    rows, landmarks = torch.nonzero((scores < limit).logical_not_(), as_tuple=True)
    probabilities = scores[rows, landmarks]
    if field.activation == "sigmoid":
        probabilities = torch.sigmoid(probabilities)
    voxels[:, 0] += first
    return voxels[rows], landmarks, probabilities


def _score_limit(field: Field, threshold: float) -> float:
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
