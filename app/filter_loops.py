"""rows of scores -> columns of votes, compiled: the loops of ``app.votes_numba``.

A row is the voxels along k. It is compared with a limit first, which the compiler turns into vector
instructions; probabilities are computed and offsets read for the few voxels that may pass.
Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import Final, no_type_check

import numpy as np

from app.activation_loops import read_voxels, value
from app.compiled import compiled, inlined

WORD: Final = 8
"""Flags looked at at once."""

# The next two have no way out of their loop on success, count in 32 bits and choose instead of
# jumping, and are two: so they become vector instructions.


@compiled
@no_type_check
def _count(row, table, background, limits):
    """Count the numbers of a row that, less a background, are not below their limits, as is NaN."""
    count = np.int32(0)
    for x in range(len(row)):
        score = value(row, table, x) - value(background, table, x)
        count = np.int32(count + np.int32(not score < limits[x]))
    return count


@compiled
@no_type_check
def _flag(row, table, background, limits, flags):
    """Set the flags of such numbers to 1, and leave the others."""
    for x in range(len(row)):
        score = value(row, table, x) - value(background, table, x)
        flags[x] = 1 if not score < limits[x] else flags[x]


@compiled
@no_type_check
def _list_hits(flags, words, flags_per_voxel, voxels):
    """List the voxels with a flag; returns how many. Jumps that cannot be foreseen cost more."""
    hits = 0
    for word in range(len(words)):
        if words[word] != 0:
            for flag in range(word * WORD, word * WORD + WORD):
                voxels[hits] = flag
                hits += flags[flag]
    if flags_per_voxel == 1:
        return hits
    count, last = 0, -1
    share = 1.0 / flags_per_voxel
    for hit in range(hits):
        k = np.int64((voxels[hit] + 0.5) * share)  # A division would take longer than all else.
        voxels[count] = k
        count += k != last
        last = k
    return count


@compiled
@no_type_check
def _copy(line, start, step, room):
    """Copy as many numbers as there is room for."""
    for x in range(len(room)):
        room[x] = line[start + x * step]


@compiled
@no_type_check
def count_rows(plan, first, last, counts):
    """Count what may pass in each of some rows.

    Args:
        plan: An ``app.votes_numba.Plan``.
        first: First row; row r has index r // size along i and the rest along j.
        last: Row to stop before.
        counts: Of each row; is written.
    """
    line, table, steps = plan.scores
    height = plan.sizes[1]
    runs, step, limits = plan.runs, plan.step, plan.limits
    size = len(limits)
    room, other_room = np.empty(size, line.dtype), np.empty(size, line.dtype)
    for row in range(first, last):
        i = row // height
        base = i * steps[1] + (row - i * height) * steps[2]
        behind = base * plan.moves
        count = 0
        if step == 1:
            background = plan.background[behind : behind + size]
            for run in runs:
                start = base + run
                count += _count(line[start : start + size], table, background, limits)
        else:
            _copy(plan.background, behind, step * plan.moves, other_room)
            for run in runs:
                _copy(line, base + run, step, room)
                count += _count(room, table, other_room, limits)
        counts[row] = count


@inlined
@no_type_check
def _flag_row(plan, base, rooms, flags):
    """Set the flags of what may pass in a row of voxels, and clear the others."""
    line, table = plan.scores.numbers, plan.scores.table
    behind, size = base * plan.moves, len(plan.limits)
    room, other_room = rooms
    flags[:] = 0
    if plan.step == 1:
        background = plan.background[behind : behind + size]
        for run in plan.runs:
            start = base + run
            _flag(line[start : start + size], table, background, plan.limits, flags)
    else:
        _copy(plan.background, behind, plan.step * plan.moves, other_room)
        for run in plan.runs:
            _copy(line, base + run, plan.step, room)
            _flag(room, table, other_room, plan.limits, flags)


@compiled
@no_type_check
def fill_rows(plan, first, last, before, votes):
    """Write the votes of some rows, ordered by voxel, then landmark.

    Args:
        plan: An ``app.votes_numba.Plan``.
        first: First row.
        last: Row to stop before.
        before: What may pass in the rows before each one: where there is room for its votes.
        votes: Landmarks, and columns of source, position, probability and weight; are written.

    Returns:
        The place after the last vote, and whether a score is not a number.
    """
    line, _, steps = plan.scores
    channels, height, width, lead, activation = plan.sizes
    size = len(plan.limits)
    rooms = (np.empty(size, line.dtype), np.empty(size, line.dtype))
    flags = np.zeros(-(-size // WORD) * WORD, dtype=np.uint8)
    words = flags.view(np.uint64)
    voxels = np.empty(len(flags) + 1, dtype=np.int64)
    probabilities, sums = np.empty((channels, width)), np.empty((2, width))
    room_for = width * (channels - lead) + 1
    chosen = (np.empty((2, room_for), dtype=np.int64), np.empty(room_for, dtype=np.float32))
    place, bad = before[first], False
    for row in range(first, last):
        if before[row] == before[row + 1]:
            continue
        i = row // height
        j = row - i * height
        base = i * steps[1] + j * steps[2]
        _flag_row(plan, base, rooms, flags)
        hit = _list_hits(flags, words, size // width, voxels)
        read_voxels(plan.scores, base, voxels[:hit], activation, probabilities, sums)
        found, wrong = _choose(probabilities, lead, plan.threshold, voxels[:hit], chosen)
        bad |= wrong
        place = _write(plan, i, j, chosen, found, place, votes)
    return place, bad


@compiled
@no_type_check
def _choose(probabilities, lead, threshold, voxels, chosen):
    """List voxels and landmarks that pass; returns how many do, and whether any is NaN."""
    which, probability = chosen
    found, bad = 0, False
    for voxel in range(len(voxels)):
        for channel in range(lead, len(probabilities)):
            p = np.float32(probabilities[channel, voxel])
            which[0, found], which[1, found] = voxels[voxel], channel - lead
            probability[found] = p
            found += p >= threshold
            bad |= np.isnan(p)
    return found, bad


@inlined
@no_type_check
def _write(plan, i, j, chosen, found, place, votes):
    """Write the votes of a row; returns the next place.

    Nothing in the loop depends on what it read before, so the memory answers many reads at once.
    """
    line, table, steps = plan.offsets
    stride, centre, scale = plan.places
    landmarks, columns = votes
    which, probability = chosen
    base = i * steps[2] + j * steps[3]
    x = np.float32(i) * stride + centre[0]
    y = np.float32(j) * stride + centre[1]
    for vote in range(found):
        k, landmark, p = which[0, vote], which[1, vote], probability[vote]
        start = base + landmark * steps[1] + k * steps[4]
        z = np.float32(k) * stride + centre[2]
        to_x = x + value(line, table, start) * scale[0]
        to_y = y + value(line, table, start + steps[0]) * scale[1]
        to_z = z + value(line, table, start + 2 * steps[0]) * scale[2]
        landmarks[place] = landmark
        columns[0, place], columns[1, place], columns[2, place] = x, y, z
        columns[3, place], columns[4, place], columns[5, place] = to_x, to_y, to_z
        columns[6, place] = p
        columns[7, place] = p * plan.profiles[0][i] * plan.profiles[1][j] * plan.profiles[2][k]
        place += np.isfinite(to_x) & np.isfinite(to_y) & np.isfinite(to_z)
    return place


@compiled
@no_type_check
def list_rows(landmark, position, probability, end, rows):
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
