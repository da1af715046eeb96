"""rows of scores -> voxels in which something may pass, compiled: the loops that read all scores.

A row is some voxels that lie evenly in memory (see ``app.voting.cpu.plan.Rows``). It is compared
with a limit, which the compiler turns into vector instructions. Functions that are compiled have no
annotations: their types are those they are called with.
"""

from typing import Final, no_type_check

import numpy as np

from app.compute import numba_jit
from app.voting.cpu.activations import NONE, value

BATCH: Final = 1024
"""Voxels whose votes are worked out together: so many that memory is asked for many offsets at
once, and few enough for the nearer caches."""

WORD: Final = 8
"""Flags that are looked at together."""

PLACES: Final = np.uint64(0x0001020304050607)
"""Times the value of the n-th byte of a word, this has n in its highest byte."""

# The next three have no way out of their loop on success, count in 32 bits and choose instead of
# jumping, and are three: so they become vector instructions.


@numba_jit
@no_type_check
def _count(row, background, limits):
    """Count the numbers of a row that, less a background, are not below their limits, as is NaN."""
    count = np.int32(0)
    for x in range(len(row)):
        score = value(row, x) - value(background, x)
        count = np.int32(count + np.int32(not score < limits[x]))
    return count


@numba_jit
@no_type_check
def _flag(row, background, limits, flags):
    """Set the flags of such numbers to 1, and the others to 0; returns 1 if any is set, else 0."""
    some = np.uint8(0)
    for x in range(len(row)):
        score = value(row, x) - value(background, x)
        flags[x] = np.uint8(not score < limits[x])
        some = np.uint8(some | flags[x])
    return some


@numba_jit
@no_type_check
def _flag_more(row, background, limits, flags):
    """Set the flags of such numbers to 1, and leave the others; returns as ``_flag``."""
    some = np.uint8(0)
    for x in range(len(row)):
        score = value(row, x) - value(background, x)
        flags[x] = np.uint8(flags[x] | np.uint8(not score < limits[x]))
        some = np.uint8(some | flags[x])
    return some


@numba_jit
@no_type_check
def _list_words(words, full):
    """List the words that are not zero; returns how many. Unforeseen jumps would cost more."""
    count = 0
    for word in range(len(words)):
        full[count] = word
        count += words[word] != 0
    return count


@numba_jit
@no_type_check
def _list_flags(words, full, first, hits):
    """List the numbers of the flags that are set in some words; returns how many.

    Args:
        words: Flags of a row.
        full: The words to look at.
        first: Number of the row's first flag.
        hits: Is written, in rising order.
    """
    count = 0
    for word in full:
        bits, start = words[word], first + word * WORD
        while bits != 0:
            lowest = bits & (~bits + np.uint64(1))
            hits[count] = start + np.int64((lowest * PLACES) >> np.uint64(56))
            bits ^= lowest
            count += 1
    return count


@numba_jit
@no_type_check
def _divide(numbers, divisor, quotients, rests):
    """Divide whole numbers, below 2^50, by another."""
    share = 1.0 / divisor  # A division would take longer than all else.
    for x in range(len(numbers)):
        quotient = np.int64((numbers[x] + 0.5) * share)
        quotients[x], rests[x] = quotient, numbers[x] - quotient * divisor


@numba_jit
@no_type_check
def _drop_repeated(numbers):
    """Leave each number once, if those that are alike stand together; returns how many are left."""
    count, last = 0, -1
    for x in range(len(numbers)):
        number = numbers[x]
        numbers[count] = number
        count += number != last
        last = number
    return count


@numba_jit
@no_type_check
def _copy(line, start, step, room):
    """Copy as many numbers as there is room for."""
    for x in range(len(room)):
        room[x] = line[start + x * step]


@numba_jit
@no_type_check
def count_rows(plan, first, last, counts):
    """Count what may pass in each of some rows.

    Args:
        plan: An ``app.voting.cpu.plan.Plan``.
        first: First row.
        last: Row to stop before.
        counts: Of each row; is written.
    """
    # Named before the loop: to take a part from a plan takes longer than all else for a row does.
    line, _ = plan.scores
    voxels, width, height, plane_step, row_step = plan.rows
    runs, step, limits = plan.runs, plan.step, plan.limits
    moves, behind = plan.moves, plan.background
    per_voxel = len(limits) // width
    room, other_room = np.empty(len(limits), line.dtype), np.empty(len(limits), line.dtype)
    for row in range(first, last):
        plane = row // height
        base = plane * plane_step + (row - plane * height) * row_step
        size = min(width, voxels - row * width) * per_voxel
        count = 0
        if step == 1:
            background = behind[base * moves :][:size]
            for run in runs:
                count += _count(line[base + run :][:size], background, limits)
        else:
            _copy(behind, base * moves, step * moves, other_room[:size])
            for run in runs:
                _copy(line, base + run, step, room[:size])
                count += _count(room[:size], other_room, limits)
        counts[row] = count


@numba_jit
@no_type_check
def find_voxels(plan, row, last, before, found):
    """List voxels in which something may pass, row by row until they are a batch.

    Args:
        plan: An ``app.voting.cpu.plan.Plan``.
        row: First row.
        last: Row to stop before.
        before: What may pass in the rows before each one, so that only those where something may
            are read; None: not known.
        found: Indices i, j and k, and which of the voxel's numbers may pass; are written. A voxel
            of which several may is listed for each where they pass by themselves, else once.

    Returns:
        The row to go on with, and how many voxels were found.
    """
    line, _ = plan.scores
    voxels, width, height, plane_step, row_step = plan.rows
    runs, step, limits = plan.runs, plan.step, plan.limits
    moves, behind = plan.moves, plan.background
    per_voxel, count = len(limits) // width, 0
    flags = np.empty(-(-len(limits) // WORD) * WORD, np.uint8)
    words = flags.view(np.uint64)
    full, hits = np.empty(len(words) + 1, np.int32), np.empty(BATCH + len(flags), np.int64)
    room, other_room = np.empty(len(limits), line.dtype), np.empty(len(limits), line.dtype)
    while row < last and count < BATCH:
        if before is None or before[row] < before[row + 1]:
            plane = row // height
            base = plane * plane_step + (row - plane * height) * row_step
            size = min(width, voxels - row * width) * per_voxel
            flags[size:] = 0
            if step == 1:
                background = behind[base * moves :][:size]
                some = _flag(line[base + runs[0] :][:size], background, limits, flags)
                for run in runs[1:]:
                    some = _flag_more(line[base + run :][:size], background, limits, flags)
            else:
                _copy(behind, base * moves, step * moves, other_room[:size])
                _copy(line, base + runs[0], step, room[:size])
                some = _flag(room[:size], other_room, limits, flags)
                for run in runs[1:]:
                    _copy(line, base + run, step, room[:size])
                    some = _flag_more(room[:size], other_room, limits, flags)
            if some:  # Most rows have none.
                full_words = full[: _list_words(words, full)]
                count += _list_flags(words, full_words, row * len(limits), hits[count:])
        row += 1
    return row, _unravel(plan, hits[:count], found)


@numba_jit
@no_type_check
def _unravel(plan, hits, found):
    """Say which voxels flags belong to, as ``find_voxels`` does; returns how many these are."""
    height, width = plan.sizes[1:3]
    per_voxel, count = len(plan.limits) // plan.rows[1], len(hits)
    numbers = np.empty(count, np.int64)
    _divide(hits, per_voxel, numbers, found[3, :count])
    if per_voxel > 1 and plan.sizes[4] != NONE:
        count = _drop_repeated(numbers)
    rows = hits[:count]
    _divide(numbers[:count], width, rows, found[2, :count])
    _divide(rows, height, found[0, :count], found[1, :count])
    return count
