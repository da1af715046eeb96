"""Field -> Survivors: the voxels and landmarks whose probability reaches the threshold.

Almost nothing passes, so almost nothing is done for a voxel that does not. The scores are read
once, in blocks that fit a cache: the best score of a voxel says, by a test without exponentials,
whether anything at it can pass; probabilities are computed for those voxels alone. In doubt, a test
lets something through: only the last one, on the probability, decides.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from app.errors import NetworkFailed
from app.indices import split_index, true_indices
from app.network import Field

BLOCK_VOXELS: Final = 1 << 19
"""Voxels looked at at once on a CPU: their best scores, 2 MB, stay in the cache from one channel to
the next, and the cost of a call is small beside that of reading them."""

DEVICE_BLOCK_VOXELS: Final = 1 << 26
"""The same on an accelerator: enough to fill it, far below nonzero's 2^31 elements."""

FEW_CHANNELS: Final = 8
"""Packed voxels of fewer channels are compared by shifted views of their memory: a reduction over
so short a last axis is several times slower than the memory."""


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


@dataclass(frozen=True, slots=True)
class _Test:
    """What a score must be to pass.

    Attributes:
        field: The field that is read.
        threshold: Least probability.
        limit: A score below it cannot pass; with softmax, a score less the background's.
        lead: Channels before the first landmark's.
    """

    field: Field
    threshold: float
    limit: float
    lead: int


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
    if field.activation == "softmax" and not field.background:
        raise ValueError("expected a background channel with softmax, got none")
    test = _Test(field, threshold, _score_limit(field, threshold), int(field.background))
    at_once = BLOCK_VOXELS if field.scores.device.type == "cpu" else DEVICE_BLOCK_VOXELS
    # One room for all blocks: fresh memory costs more than what is done with it.
    room = field.scores.new_empty(min(at_once, field.scores.numel()))
    parts = [
        part
        for first, voxels in _blocks(field.scores, at_once)
        if (part := _survivors(voxels, first, test, room)) is not None
    ]
    none = torch.zeros(0, dtype=torch.int64, device=field.scores.device)
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    voxel, landmark, probability = columns or [none, none, none.float()]
    found = Survivors(*split_index(voxel, field.scores.shape[3]), landmark, probability)
    passes = probability >= threshold
    if bool(passes.all()):
        return found
    if bool(probability.isnan().any()):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    return _select(found, true_indices(passes))


def _blocks(
    scores: Float[Tensor, "channels i j k"], at_once: int
) -> Iterator[tuple[int, Float[Tensor, "channels voxels"]]]:
    """Cut the scores into blocks of voxels; only where no view can do that, slices are copied.

    Yields:
        The number of the first voxel, and the block.
    """
    channels, depth, height, width = scores.shape
    slices = depth
    try:
        scores.view(channels, -1)
    except RuntimeError:
        slices = max(1, at_once // max(1, height * width))
    for slab in range(0, depth, slices):
        voxels = scores[:, slab : slab + slices].reshape(channels, -1)
        if _is_packed(voxels):
            at_once = max(1, at_once // channels)
        for first in range(0, voxels.shape[1], at_once):
            yield slab * height * width + first, voxels[:, first : first + at_once]


def _is_packed(voxels: Float[Tensor, "channels voxels"]) -> bool:
    """Say whether the few scores of a voxel lie side by side, and then those of the next."""
    return voxels.stride() == (1, len(voxels)) and len(voxels) < FEW_CHANNELS


def _survivors(
    voxels: Float[Tensor, "channels voxels"], first: int, test: _Test, room: Float[Tensor, " room"]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Find what may pass in a block, NaN included: number of the voxel, landmark, probability."""
    best = _best(voxels, test, room)
    # Not "best >= limit": a NaN fails every comparison, so this way it is kept, and found.
    if bool(best.amax() < test.limit):
        return None
    found = true_indices((best < test.limit).logical_not_())
    scores = _columns(voxels, found).float()
    limit = test.limit
    # In float64, as the last bit of a float32 exponential depends on its place in a vector.
    if test.field.activation == "softmax":
        scores, limit = torch.softmax(scores.double(), dim=0).float(), test.threshold
    scores = scores[test.lead :]
    passes = (scores < limit).logical_not_().T.contiguous()
    place, landmark = split_index(true_indices(passes.view(-1)), len(scores))
    probability = scores.reshape(-1).index_select(0, landmark * len(found) + place)
    if test.field.activation == "sigmoid":
        probability = torch.sigmoid(probability.double()).float()
    return found.index_select(0, place) + first, landmark, probability


def _columns(
    voxels: Float[Tensor, "channels voxels"], chosen: Int64[Tensor, " chosen"]
) -> Float[Tensor, "channels chosen"]:
    """Copy some voxels' scores; index_select would first copy all of a block it cannot walk."""
    if voxels.stride(1) == 1:
        return voxels.index_select(1, chosen)
    return voxels.T[chosen].T.contiguous()


def _best(
    voxels: Float[Tensor, "channels voxels"], test: _Test, room: Float[Tensor, " room"]
) -> Float[Tensor, " voxels"]:
    """Give the best score of a landmark at every voxel, with softmax less the background's.

    Each way of laying out memory has its own fastest way; the results are the same.
    """
    if voxels.stride(1) == 1:
        best = voxels[test.lead]
        for channel in voxels[test.lead + 1 :]:
            best = torch.maximum(best, channel, out=room[: len(channel)])
    elif _is_packed(voxels):
        return _best_of_packed(voxels, test, room)
    else:
        best = voxels[test.lead :].amax(0)
    if test.field.activation == "softmax":
        best = torch.sub(best, voxels[0], out=room[: len(best)])
    return best


def _best_of_packed(
    voxels: Float[Tensor, "channels voxels"], test: _Test, room: Float[Tensor, " room"]
) -> Float[Tensor, " voxels"]:
    """Do the same where a voxel's few scores lie side by side.

    Every element is compared with those after it, whatever it is, along the whole memory at once;
    then the results that belong to a voxel's first element are picked.
    """
    channels = len(voxels)
    memory = voxels.T.reshape(-1)
    last = len(memory) - channels + 1
    best = memory[test.lead : test.lead + last]
    for channel in range(test.lead + 1, channels):
        best = torch.maximum(best, memory[channel : channel + last], out=room[:last])
    if test.field.activation == "softmax":
        best = torch.sub(best, memory[:last], out=room[:last])
    return best[::channels]


def _select(found: Survivors, kept: Int64[Tensor, " kept"]) -> Survivors:
    return Survivors(
        row=found.row.index_select(0, kept),
        k=found.k.index_select(0, kept),
        landmark=found.landmark.index_select(0, kept),
        probability=found.probability.index_select(0, kept),
    )


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
