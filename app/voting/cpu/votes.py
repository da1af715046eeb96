"""Field -> votes, or rows of votes, on the CPU, compiled: scores are read once, votes alone kept.

``app.voting.reference`` defines in torch what is computed. Here probabilities are computed and
offsets read, or computed by a network's last layer, for the few candidates alone, a batch at a
time. Rows of voxels are divided among torch's threads.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from app.compute import numba_jit, run_split, value
from app.errors import NetworkFailed
from app.model import Field
from app.voting.cpu.activations import NONE, read_voxels
from app.voting.cpu.plan import make_plan
from app.voting.cpu.rows import BATCH, find_candidates
from app.voting.reference import Columns, Placement

SCORES_PER_THREAD: Final = 1 << 18
"""Fewer are not worth a thread of their own: they take less than a millisecond."""

BLOCK: Final = 1 << 15
"""Votes, whose number is not known beforehand, are allocated in blocks of this many."""

Block = TypeVar("Block")


def filter_columns(field: Field, threshold: float, placement: Placement) -> Columns:
    """Do as ``app.voting.reference.filter_columns``."""
    blocks = _filter_blocks(field, threshold, placement, lambda *block: block)
    landmarks, columns = zip(*blocks, strict=True)
    return torch.from_numpy(np.concatenate(landmarks)), torch.from_numpy(np.hstack(columns))


def filter_rows(
    field: Field, threshold: float, sample_shape: Sequence[int], placement: Placement
) -> Float32[Tensor, "rows 5"]:
    """Do as ``app.voting.votes.filter_rows``; votes as columns are only ever in the cache."""
    end = np.array(sample_shape, dtype=np.float32)

    def list_rows(landmarks: np.ndarray, columns: np.ndarray) -> np.ndarray:
        rows = np.empty((len(landmarks), 5), dtype=np.float32)
        return rows[: _write_rows(landmarks, tuple(columns[3:6]), columns[6], end, rows)]

    return torch.from_numpy(np.concatenate(_filter_blocks(field, threshold, placement, list_rows)))


def _filter_blocks(
    field: Field,
    threshold: float,
    placement: Placement,
    convert: Callable[[np.ndarray, np.ndarray], Block],
) -> list[Block]:
    """Divide the rows of a field among threads; each lists the votes of one block after the other.

    Args:
        field: Scores and offsets.
        threshold: Least probability of a vote.
        placement: Where the field lies in the grid.
        convert: Makes of the landmarks and columns of a block's votes what is kept of them.

    Returns:
        What is kept, in the order of the rows.

    Raises:
        NetworkFailed: A score is not a number, or the softmax of some is none.
    """
    plan = make_plan(field, threshold, placement)
    # What a batch of candidates may become, at least.
    capacity = max(BLOCK, (plan.channels - plan.first_channel) * (BATCH + len(plan.limits)) + 1)
    scores_per_row = plan.channels * plan.rows.width

    def fill_part(row: int, end: int) -> list[Block]:
        blocks = []
        while row < end:
            landmarks, columns = np.empty(capacity, np.int64), np.empty((8, capacity), np.float32)
            row, count, invalid = _fill_votes(plan, row, end, landmarks, columns)
            if invalid:
                raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
            blocks.append(convert(landmarks[:count], columns[:, :count]))
        return blocks

    parts = run_split(fill_part, plan.rows.length, max(1, SCORES_PER_THREAD // scores_per_row))
    return [block for blocks in parts for block in blocks]


@numba_jit
def _fill_votes(plan, row, last, landmarks, columns):
    """Write the votes of some rows, ordered by voxel, then landmark.

    Args:
        plan: A ``Plan``.
        row: First row.
        last: Row to stop before.
        landmarks: Written, up to its capacity.
        columns: Source, position, probability and weight of each vote; written.

    Returns:
        The row to go on with, how many votes were written, and whether a score is not a number.
    """
    # For a batch of candidates, and for the votes among them.
    size = BATCH + len(plan.limits)
    voxels, starts = np.empty((4, size), np.int64), np.empty((2, size), np.int64)
    centres = np.empty((4, size), np.float32)
    probabilities, sums = np.empty((plan.channels, size)), np.empty((2, size))
    passing = np.empty((2, size * (plan.channels - plan.first_channel) + 1), np.int64)
    probability = np.empty(passing.shape[1], np.float32)
    is_flagged = plan.activation == NONE and len(plan.limits) == plan.channels * plan.rows.width
    index, any_invalid = 0, False
    while row < last and index + len(probability) <= len(landmarks):
        row, count = find_candidates(plan, row, last, voxels)
        _describe(plan, (voxels[0, :count], voxels[1, :count], voxels[2, :count]), starts, centres)
        if is_flagged:
            flags = voxels[3, :count]
            found, invalid = _choose_flagged(plan, starts[0, :count], flags, passing, probability)
        else:
            read_voxels(plan.scores, starts[0, :count], plan.activation, probabilities, sums)
            chosen = probabilities[plan.first_channel :, :count]
            found, invalid = _choose(chosen, plan.threshold, passing, probability)
        passed = (starts[1], centres, passing[0, :found], passing[1, :found], probability[:found])
        index = _write(plan, passed, (landmarks, columns), index)
        any_invalid |= invalid
    return row, index, any_invalid


@numba_jit
def _describe(plan, voxels, starts, centres):
    """Compute where voxels' first scores and offsets lie, their centres, and their importance."""
    count = len(voxels[0])
    _locate(voxels, plan.scores.strides[1:], starts[0, :count])
    _locate(voxels, plan.offsets.strides[2:], starts[1, :count])
    for axis in range(3):
        _centre(voxels[axis], plan.stride, plan.first_centre[axis], centres[axis, :count])
    _weigh(voxels, plan.profiles, centres[3, :count])


@numba_jit
def _choose_flagged(plan, starts, channel, passing, probability):
    """Choose what passes of probabilities that were flagged one by one; returns as ``_choose``."""
    numbers, _ = plan.scores
    first, threshold = plan.first_channel, plan.threshold
    found, invalid = 0, False
    for x in range(len(starts)):
        p = value(numbers, starts[x] + channel[x])
        passing[0, found], passing[1, found] = x, channel[x] - first
        probability[found] = p
        found += p >= threshold
        invalid |= np.isnan(p) and channel[x] >= first
    return found, invalid


@numba_jit
def _choose(probabilities, threshold, passing, probability):
    """Choose voxels and landmarks that pass; returns how many do, and whether any is NaN."""
    found, invalid = 0, False
    for voxel in range(probabilities.shape[1]):
        for landmark in range(len(probabilities)):
            p = np.float32(probabilities[landmark, voxel])
            # Few do, and mostly the same as in the voxel before: such branches are predicted.
            if not p < threshold:
                passing[0, found], passing[1, found] = voxel, landmark
                probability[found] = p
                found += p >= threshold
                invalid |= np.isnan(p)
    return found, invalid


@numba_jit
def _write(plan, passed, votes, index):
    """Write the votes of a batch; returns the next index."""
    numbers, strides = plan.offsets
    starts, centres, voxel, landmark, probability = passed
    landmarks, columns = votes
    end = index + len(probability)
    landmarks[index:end], columns[6, index:end] = landmark, probability
    targets, finite = np.empty(len(probability), np.int64), np.int32(1)
    is_deferred = plan.layer.bias.size > 0
    if is_deferred:
        _take(starts, voxel, targets)
        _apply_layer(plan, targets, landmark, columns[3:6, index:end])
    else:
        _index_offsets(starts, voxel, landmark, strides[1], targets)
    for axis in range(3):
        source, position = columns[axis, index:end], columns[3 + axis, index:end]
        _take(centres[axis], voxel, source)
        scale = plan.offset_scale[axis]
        if is_deferred:
            _move(source, scale, position)
        else:
            _add_offsets(numbers, targets, axis * strides[0], scale, source, position)
        finite &= _all_finite(position)
    _take(centres[3], voxel, columns[7, index:end])
    _multiply(columns[7, index:end], probability)
    return end if finite else _drop_infinite(landmarks, columns, index, end)


@numba_jit
def _apply_layer(plan, starts, landmark, offsets):
    """Compute the offsets of votes from the features of their voxels, which begin at ``starts``."""
    numbers, strides = plan.offsets
    weight, bias = plan.layer
    for x in range(len(starts)):
        c = landmark[x]
        i, j, k = bias[0, c], bias[1, c], bias[2, c]
        for f in range(weight.shape[2]):
            feature = value(numbers, starts[x] + f * strides[1])
            i += feature * weight[0, c, f]
            j += feature * weight[1, c, f]
            k += feature * weight[2, c, f]
        offsets[0, x], offsets[1, x], offsets[2, x] = i, j, k


# Each of these is one loop over arrays in a function of its own: only such loops are vectorised.


@numba_jit
def _locate(voxels, strides, starts):
    i, j, k = voxels
    for x in range(len(starts)):
        starts[x] = i[x] * strides[0] + j[x] * strides[1] + k[x] * strides[2]


@numba_jit
def _centre(index, stride, first, centres):
    for x in range(len(centres)):
        centres[x] = np.float32(index[x]) * stride + first


@numba_jit
def _weigh(voxels, profiles, weights):
    i, j, k = voxels
    along_i, along_j, along_k = profiles
    for x in range(len(weights)):
        weights[x] = along_i[i[x]] * along_j[j[x]] * along_k[k[x]]


@numba_jit
def _index_offsets(starts, voxel, landmark, stride, targets):
    for x in range(len(targets)):
        targets[x] = starts[voxel[x]] + landmark[x] * stride


@numba_jit
def _take(values, which, column):
    for x in range(len(column)):
        column[x] = values[which[x]]


@numba_jit
def _add_offsets(numbers, targets, shift, scale, source, position):
    for x in range(len(position)):
        position[x] = source[x] + value(numbers, targets[x] + shift) * scale


@numba_jit
def _move(source, scale, position):
    for x in range(len(position)):
        position[x] = source[x] + position[x] * scale


@numba_jit
def _multiply(column, factors):
    for x in range(len(column)):
        column[x] *= factors[x]


@numba_jit
def _all_finite(column):
    """Test whether all are finite: the difference of a number and itself is 0, or else NaN."""
    finite = np.int32(1)
    for x in range(len(column)):
        finite &= np.int32(column[x] - column[x] == 0)
    return finite


@numba_jit
def _drop_infinite(landmarks, columns, index, end):
    """Drop votes without a finite position; returns the index after the last vote left."""
    for vote in range(index, end):
        landmarks[index], columns[:, index] = landmarks[vote], columns[:, vote]
        index += np.isfinite(columns[3:6, vote]).all()
    return index


@numba_jit
def _write_rows(landmark, position, probability, end, rows):
    """Write landmark, probability and position of the votes with 0 <= position < end.

    Returns:
        How many rows were written.
    """
    i, j, k = position
    count = 0
    for vote in range(len(landmark)):
        rows[count, 0] = landmark[vote]
        rows[count, 1] = probability[vote]
        rows[count, 2], rows[count, 3], rows[count, 4] = i[vote], j[vote], k[vote]
        inside = (i[vote] >= 0) & (i[vote] < end[0]) & (j[vote] >= 0) & (j[vote] < end[1])
        count += inside & (k[vote] >= 0) & (k[vote] < end[2])
    return count
