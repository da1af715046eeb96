"""rows of scores -> voxels in which something may pass, compiled: the loops that read all scores.

A row is the voxels along k. It is compared with a limit, which the compiler turns into vector
instructions. Functions that are compiled have no annotations: their types are those they are
called with.
"""

from typing import Final, no_type_check

import numpy as np

from app.activation_loops import value
from app.compiled import compiled

BATCH: Final = 256
"""Voxels whose votes are worked out together: enough for vector instructions, few enough for the
cache nearest to the processor."""

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
def _list_hits(flags, flags_per_voxel, voxels):
    """List the voxels with a flag; returns how many. Jumps that cannot be foreseen cost more."""
    hits = 0
    for flag in range(len(flags)):
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


@compiled
@no_type_check
def find_voxels(plan, row, last, before, voxels):
    """List voxels in which something may pass, row by row until they are a batch.

    Returns:
        The row to go on with, and how many voxels were found.
    """
    # Named before the loop: to take a part from a plan takes longer than all else for a row does.
    line, table, steps = plan.scores
    height, flags_per_voxel = plan.sizes[1], len(plan.limits) // plan.sizes[2]
    runs, step, limits = plan.runs, plan.step, plan.limits
    moves, behind = plan.moves, plan.background
    size, count = len(limits), 0
    flags = np.empty(size, np.uint8)
    room, other_room = np.empty(size, line.dtype), np.empty(size, line.dtype)
    while row < last and count < BATCH:
        if before[row] < before[row + 1]:
            i = row // height
            j = row - i * height
            base = i * steps[1] + j * steps[2]
            flags[:] = 0
            if step == 1:
                background = behind[base * moves : base * moves + size]
                for run in runs:
                    start = base + run
                    _flag(line[start : start + size], table, background, limits, flags)
            else:
                _copy(behind, base * moves, step * moves, other_room)
                for run in runs:
                    _copy(line, base + run, step, room)
                    _flag(room, table, other_room, limits, flags)
            end = count + _list_hits(flags, flags_per_voxel, voxels[2, count:])
            voxels[0, count:end], voxels[1, count:end] = i, j
            count = end
        row += 1
    return row, count
