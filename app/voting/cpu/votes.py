"""rows of scores -> columns of votes, compiled: the loops of ``app.voting.cpu.plan``.

Probabilities are computed and offsets read for the few voxels that may pass, a batch at a time.
Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import no_type_check

import numpy as np

from app.compute import numba_jit
from app.voting.cpu.activations import NONE, read_voxels, value
from app.voting.cpu.rows import BATCH, find_voxels


@numba_jit
@no_type_check
def fill_rows(plan, first, last, before, votes):
    """Write the votes of some rows, ordered by voxel, then landmark.

    Args:
        plan: An ``app.voting.cpu.plan.Plan``.
        first: First row.
        last: Row to stop before.
        before: What may pass in the rows before each one: where there is room for its votes.
        votes: Landmarks, and columns of source, position, probability and weight; are written.

    Returns:
        The place after the last vote, and whether a score is not a number.
    """
    desk = _make_desk(plan)
    row, place, bad = first, before[first], False
    while row < last:
        row, place, wrong = _fill_batch(plan, (row, last, before), desk, votes, place)
        bad |= wrong
    return place, bad


@numba_jit
@no_type_check
def list_rows(plan, row, last, end, rows):
    """Write the votes with 0 <= position < end of some rows as ``filter_rows`` lists them.

    Their columns are never in memory, but only in the cache, a batch at a time.

    Args:
        plan: An ``app.voting.cpu.plan.Plan``.
        row: First row.
        last: Row to stop before.
        end: Along each axis.
        rows: Landmark, probability and position of each vote; are written, as many as have room.

    Returns:
        The row to go on with, how many votes were written, and whether a score is not a number.
    """
    desk = _make_desk(plan)
    most = desk[-1].shape[1]
    landmarks, columns = np.empty(most, np.int64), np.empty((8, most), np.float32)
    place, bad = 0, False
    while row < last and place + most <= len(rows):
        row, count, wrong = _fill_batch(plan, (row, last, None), desk, (landmarks, columns), 0)
        place += _list_votes(landmarks[:count], columns[3:6], columns[6], end, rows[place:])
        bad |= wrong
    return row, place, bad


@numba_jit
@no_type_check
def _make_desk(plan):
    """Make room for what is known of a batch of voxels, and of those who vote among them."""
    channels, _, _, lead, _ = plan.sizes
    room = BATCH + len(plan.limits)
    voxels, starts = np.empty((4, room), np.int64), np.empty((2, room), np.int64)
    places = np.empty((4, room), np.float32)
    probabilities, sums = np.empty((channels, room)), np.empty((2, room))
    which = np.empty((2, room * (channels - lead) + 1), np.int64)
    chances = np.empty(which.shape[1], np.float32)
    return voxels, starts, places, probabilities, sums, chances, which


@numba_jit
@no_type_check
def _fill_batch(plan, rows, desk, votes, place):
    """Write the votes of a batch; returns the next row, the next place, and whether any is NaN."""
    voxels, starts, places, probabilities, sums, chances, which = desk
    channels, _, _, lead, activation = plan.sizes
    row, count = find_voxels(plan, *rows, voxels)
    _describe(plan, (voxels[0, :count], voxels[1, :count], voxels[2, :count]), starts, places)
    if activation == NONE and len(plan.limits) == channels * plan.rows[1]:
        found, bad = _take_flagged(plan, starts[0, :count], voxels[3, :count], which, chances)
    else:
        read_voxels(plan.scores, starts[0, :count], activation, probabilities, sums)
        found, bad = _choose(probabilities[lead:, :count], plan.threshold, which, chances)
    voters = (starts[1], places, which[0, :found], which[1, :found], chances[:found])
    return row, _write(plan, voters, votes, place), bad


@numba_jit
@no_type_check
def _describe(plan, voxels, starts, places):
    """Say where voxels' first scores and offsets lie, their centres, and what they count."""
    stride, centre, _ = plan.places
    count = len(voxels[0])
    _locate(voxels, plan.scores.steps[1:], starts[0, :count])
    _locate(voxels, plan.offsets.steps[2:], starts[1, :count])
    for axis in range(3):
        _centre(voxels[axis], stride, centre[axis], places[axis, :count])
    _weigh(voxels, plan.profiles, places[3, :count])


@numba_jit
@no_type_check
def _take_flagged(plan, starts, channel, which, chances):
    """List what passes of probabilities that were flagged one by one; returns as ``_choose``."""
    line, _ = plan.scores
    lead, threshold = plan.sizes[3], plan.threshold
    found, bad = 0, False
    for x in range(len(starts)):
        p = value(line, starts[x] + channel[x])
        which[0, found], which[1, found] = x, channel[x] - lead
        chances[found] = p
        found += p >= threshold
        bad |= np.isnan(p) and channel[x] >= lead
    return found, bad


@numba_jit
@no_type_check
def _choose(probabilities, threshold, which, chances):
    """List voxels and landmarks that pass; returns how many do, and whether any is NaN."""
    found, bad = 0, False
    for voxel in range(probabilities.shape[1]):
        for landmark in range(len(probabilities)):
            p = np.float32(probabilities[landmark, voxel])
            # Few do, and mostly the same as in the voxel before: such jumps are foreseen.
            if not p < threshold:
                which[0, found], which[1, found] = voxel, landmark
                chances[found] = p
                found += p >= threshold
                bad |= np.isnan(p)
    return found, bad


@numba_jit
@no_type_check
def _write(plan, voters, votes, place):
    """Write the votes of a batch; returns the next place."""
    line, steps = plan.offsets
    starts, places, voxel, landmark, chances = voters
    landmarks, columns = votes
    end = place + len(chances)
    landmarks[place:end], columns[6, place:end] = landmark, chances
    aims, sound = np.empty(len(chances), np.int64), np.int32(1)
    _aim(starts, voxel, landmark, steps[1], aims)
    for axis in range(3):
        source, position = columns[axis, place:end], columns[3 + axis, place:end]
        _take(places[axis], voxel, source)
        _move(line, aims, axis * steps[0], plan.places[2][axis], source, position)
        sound &= _all_finite(position)
    _take(places[3], voxel, columns[7, place:end])
    _multiply(columns[7, place:end], chances)
    return end if sound else _drop_lost(landmarks, columns, place, end)


# Each of these has one loop over arrays, and is a function: only such loops become vector
# instructions.


@numba_jit
@no_type_check
def _locate(voxels, steps, starts):
    i, j, k = voxels
    for x in range(len(starts)):
        starts[x] = i[x] * steps[0] + j[x] * steps[1] + k[x] * steps[2]


@numba_jit
@no_type_check
def _centre(index, stride, first, places):
    for x in range(len(places)):
        places[x] = np.float32(index[x]) * stride + first


@numba_jit
@no_type_check
def _weigh(voxels, profiles, weights):
    i, j, k = voxels
    along_i, along_j, along_k = profiles
    for x in range(len(weights)):
        weights[x] = along_i[i[x]] * along_j[j[x]] * along_k[k[x]]


@numba_jit
@no_type_check
def _aim(starts, voxel, landmark, step, aims):
    for x in range(len(aims)):
        aims[x] = starts[voxel[x]] + landmark[x] * step


@numba_jit
@no_type_check
def _take(values, which, column):
    for x in range(len(column)):
        column[x] = values[which[x]]


@numba_jit
@no_type_check
def _move(line, aims, ahead, scale, source, position):
    for x in range(len(position)):
        position[x] = source[x] + value(line, aims[x] + ahead) * scale


@numba_jit
@no_type_check
def _multiply(column, factors):
    for x in range(len(column)):
        column[x] *= factors[x]


@numba_jit
@no_type_check
def _all_finite(column):
    """Say so; the difference of a number and itself is 0, or else NaN."""
    sound = np.int32(1)
    for x in range(len(column)):
        sound &= np.int32(column[x] - column[x] == 0)
    return sound


@numba_jit
@no_type_check
def _drop_lost(landmarks, columns, place, end):
    """Close the gaps of votes for no place; returns the place after the last vote that is left."""
    for vote in range(place, end):
        landmarks[place], columns[:, place] = landmarks[vote], columns[:, vote]
        place += np.isfinite(columns[3:6, vote]).all()
    return place


@numba_jit
@no_type_check
def _list_votes(landmark, position, probability, end, rows):
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
