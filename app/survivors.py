"""Field -> Survivors: the voxels and landmarks whose probability reaches the threshold.

Almost nothing passes, so almost nothing is done for a voxel that does not. The scores are read
once, by a reduction that runs at the speed of the memory: can anything in a row of voxels (along k)
pass at all? Only rows that may are looked at voxel by voxel, by a test without exponentials;
probabilities are computed for the voxels that pass that. In doubt, a test lets something through:
only the last one, on the probability, decides.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from app.errors import NetworkFailed
from app.indices import split_index, true_indices
from app.network import Field

BLOCK_BYTES: Final = 1 << 22
"""Scores looked at voxel by voxel at once on a CPU: enough to hide the cost of a call, few enough
for the cache."""

DEVICE_BLOCK_BYTES: Final = 1 << 28
"""The same on an accelerator: large enough to fill it, far below nonzero's 2^31 elements."""

FEW_CHANNELS: Final = 8
"""Channels-last scores of fewer channels are screened by another way: a reduction over so short a
last axis is several times slower than the memory."""


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
    parts = [
        part
        for first, rows in _slabs(field.scores)
        for numbers in _candidates(rows, test)
        if (part := _survivors(rows, numbers, first, test)) is not None
    ]
    none = torch.zeros(0, dtype=torch.int64, device=field.scores.device)
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    row, k, landmark, probability = columns or [none, none, none, none.float()]
    found = Survivors(row, k, landmark, probability)
    passes = probability >= threshold
    if bool(passes.all()):
        return found
    if bool(probability.isnan().any()):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    return _select(found, true_indices(passes))


def _slabs(
    scores: Float[Tensor, "channels i j k"],
) -> Iterator[tuple[int, Float[Tensor, "channels rows k"]]]:
    """View the scores as rows of voxels; copy a few slices at a time where no view can do that.

    Yields:
        The number of the first row, and the rows.
    """
    channels, depth, height, width = scores.shape
    try:
        yield 0, scores.view(channels, depth * height, width)
    except RuntimeError:
        thickness = max(1, _block_bytes(scores) // max(1, scores[:, :1].nbytes))
        for first in range(0, depth, thickness):
            slab = scores[:, first : first + thickness]
            yield first * height, slab.reshape(channels, -1, width)


def _block_bytes(scores: Tensor) -> int:
    return BLOCK_BYTES if scores.device.type == "cpu" else DEVICE_BLOCK_BYTES


def _candidates(
    rows: Float[Tensor, "channels rows k"], test: _Test
) -> Iterator[slice | Int64[Tensor, " chosen"]]:
    """List the rows in which something may pass, a block at a time: all of them, or by number."""
    # Not "best >= limit": a NaN fails every comparison, so this way it is kept, and found.
    may_pass = (_best_of_rows(rows, test) < test.limit).logical_not_()
    numbers = true_indices(may_pass)
    count = rows.shape[1]
    at_once = max(1, _block_bytes(rows) // max(1, rows[:, :1].nbytes))
    if 2 * len(numbers) > count:
        yield from (slice(first, first + at_once) for first in range(0, count, at_once))
    elif len(numbers):
        yield from numbers.split(at_once)


def _best_of_rows(rows: Float[Tensor, "channels rows k"], test: _Test) -> Float[Tensor, " rows"]:
    """Bound the score of everything in a row from above, NaN if anything in it is NaN."""
    channels, _, width = rows.shape
    softmax = test.field.activation == "softmax"
    if (
        rows.stride(0) == 1
        and rows.stride(2) == channels < FEW_CHANNELS
        and rows.stride(1) == (channels * width)
    ):
        return _best_of_short_voxels(rows.permute(1, 2, 0).flatten(1), channels, test)
    scores = rows[test.lead :]
    # The order of reductions that reads memory in its own order.
    best = scores.amax((0, 2)) if rows.stride(0) == 1 else scores.amax(2).amax(0)
    return best - rows[0].amin(1) if softmax else best


def _best_of_short_voxels(
    rows: Float[Tensor, "rows scores"], channels: int, test: _Test
) -> Float[Tensor, " rows"]:
    """Bound the rows of packed voxels: channels that do not count are moved out of the way."""
    background = (torch.arange(rows.shape[1], device=rows.device) % channels) < test.lead
    lowered = torch.where(background, -math.inf, 0.0).to(rows.dtype)
    raised = torch.where(background, 0.0, math.inf).to(rows.dtype)
    at_once = max(1, _block_bytes(rows) // max(1, rows[:1].nbytes))
    moved = torch.empty_like(rows[:at_once])
    best = rows.new_empty(len(rows))
    for first in range(0, len(rows), at_once):
        block = rows[first : first + at_once]
        room = moved[: len(block)]
        top = best[first : first + at_once]
        torch.amax(torch.add(block, lowered, out=room), 1, out=top)
        if test.field.activation == "softmax":
            top -= torch.add(block, raised, out=room).amin(1)
    return best


def _survivors(
    rows: Float[Tensor, "channels rows k"],
    numbers: slice | Int64[Tensor, " chosen"],
    first: int,
    test: _Test,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Find what may pass in some rows, NaN included: row, k, landmark and probability."""
    block = rows[:, numbers]
    found = true_indices(_may_hold_votes(block, test).flatten())
    if len(found) == 0:
        return None
    # Channels first: that is how softmax is fast, and voxels last is how memory is read in order.
    scores = block.flatten(1).index_select(1, found).float()
    limit = test.limit
    # In float64, as the last bit of a float32 exponential depends on its place in a vector.
    if test.field.activation == "softmax":
        scores, limit = torch.softmax(scores.double(), dim=0).float(), test.threshold
    scores = scores[test.lead :]
    passes = (scores < limit).logical_not_().T.contiguous()
    voxel, landmark = split_index(true_indices(passes.view(-1)), len(scores))
    probability = scores.view(-1).index_select(0, landmark * len(found) + voxel)
    if test.field.activation == "sigmoid":
        probability = torch.sigmoid(probability.double()).float()
    row, k = split_index(found.index_select(0, voxel), rows.shape[2])
    row = numbers.index_select(0, row) if isinstance(numbers, Tensor) else row + numbers.start
    return row + first, k, landmark, probability


def _select(found: Survivors, kept: Int64[Tensor, " kept"]) -> Survivors:
    return Survivors(
        row=found.row.index_select(0, kept),
        k=found.k.index_select(0, kept),
        landmark=found.landmark.index_select(0, kept),
        probability=found.probability.index_select(0, kept),
    )


def _may_hold_votes(block: Float[Tensor, "channels rows k"], test: _Test) -> Bool[Tensor, "rows k"]:
    """Say which voxels have a landmark that may pass."""
    best = block[test.lead :].amax(0)
    if test.field.activation == "softmax":
        best = best - block[0]
    return (best < test.limit).logical_not_()


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
