"""Scores -> candidate voxels, compiled: the loops that read all scores.

Row by row (``app.voting.cpu.plan.RowLayout``), scores are compared with a limit, which the compiler
turns into vector instructions. A candidate is a voxel in which some landmark may pass.
"""

from typing import Final

import numpy as np

from app.compute import numba_jit, value
from app.voting.cpu.activations import NONE

BATCH: Final = 1024
"""Candidates processed together: so many that many offsets are requested from memory at once, and
few enough for the nearer caches."""

WORD: Final = 8
"""Flags tested together."""

BYTE_NUMBERS: Final = np.uint64(0x0001020304050607)
"""Times the value of the n-th byte of a word, this has n in its highest byte."""

# The next two have no early exit, count in 32 bits, select instead of branching, and are two
# functions: so they become vector instructions.


@numba_jit
def _count(row, background, limit):
    """Count the numbers of a row that, less a background, are not below a limit, as is NaN."""
    count = np.int32(0)
    for x in range(len(row)):
        score = value(row, x) - value(background, x)
        count = np.int32(count + np.int32(not score < limit))
    return count


@numba_jit
def _flag(row, background, limits, flags):
    """Set the flags of such numbers to 1, and leave the others as they are."""
    for x in range(len(row)):
        score = value(row, x) - value(background, x)
        flags[x] = np.uint8(flags[x] | np.uint8(not score < limits[x]))


@numba_jit
def _list_words(words, nonzero):
    """List the words that are not zero; returns how many. Mispredicted branches would cost more."""
    count = 0
    for word in range(len(words)):
        nonzero[count] = word
        count += words[word] != 0
    return count


@numba_jit
def _list_flags(words, nonzero, first, hits):
    """List the indices of the flags that are set in some words; returns how many.

    Args:
        words: Flags of a row.
        nonzero: Indices of the words to list.
        first: Index of the row's first flag.
        hits: Written, in rising order.
    """
    count = 0
    for word in nonzero:
        bits, start = words[word], first + word * WORD
        while bits != 0:
            lowest = bits & (~bits + np.uint64(1))
            hits[count] = start + np.int64((lowest * BYTE_NUMBERS) >> np.uint64(56))
            bits ^= lowest
            count += 1
    return count


@numba_jit
def _divide(numbers, divisor, quotients, remainders):
    """Divide whole numbers, below 2^50, by another."""
    reciprocal = 1.0 / divisor  # A division would take longer than all else.
    for x in range(len(numbers)):
        quotient = np.int64((numbers[x] + 0.5) * reciprocal)
        quotients[x], remainders[x] = quotient, numbers[x] - quotient * divisor


@numba_jit
def _drop_repeated(numbers):
    """Keep one of equal neighbours; returns how many numbers are left."""
    count, last = 0, -1
    for x in range(len(numbers)):
        number = numbers[x]
        numbers[count] = number
        count += number != last
        last = number
    return count


@numba_jit
def _line(flat, start, stride, each, target):
    """View some numbers of each of evenly spaced voxels, or copy them there to have no gaps."""
    if stride == each:
        return flat[start:][: len(target)]
    for voxel in range(len(target) // each):
        for x in range(each):
            target[voxel * each + x] = flat[start + voxel * stride + x]
    return target


@numba_jit
def find_candidates(plan, row, last, candidates):
    """List candidates, row by row until they are a batch.

    Args:
        plan: A ``Plan``.
        row: First row.
        last: Row to stop before.
        candidates: Indices i, j and k, and which of the voxel's numbers may pass; written. A voxel
            in which several may is listed for each if they are probabilities, else once.

    Returns:
        The row to go on with, and the number of candidates.
    """
    # Read before the loop: to read a field of a plan takes longer than all else for a row does.
    flat, _ = plan.scores
    voxels, width, height, plane_stride, row_stride = plan.rows
    runs, stride, limits = plan.runs, plan.run_stride, plan.limits
    moves, behind = plan.background_moves, plan.background
    per_voxel, count = len(limits) // width, 0
    least = limits.min()  # Nearly always that of all; to read each takes as long as the scores do.
    behind_stride = stride if moves else per_voxel
    flags = np.empty(-(-len(limits) // WORD) * WORD, np.uint8)
    words = flags.view(np.uint64)
    nonzero, hits = np.empty(len(words) + 1, np.int32), np.empty(BATCH + len(flags), np.int64)
    copied, copied_background = np.empty(len(limits), flat.dtype), np.empty(len(limits), flat.dtype)
    while row < last and count < BATCH:
        plane = row // height
        base = plane * plane_stride + (row - plane * height) * row_stride
        size = min(width, voxels - row * width) * per_voxel
        background = _line(behind, base * moves, behind_stride, per_voxel, copied_background[:size])
        some = 0
        for run in runs:
            line = _line(flat, base + run, stride, per_voxel, copied[:size])
            some += _count(line, background, least)
        if some:  # Most rows have none, and are read no second time.
            flags[:] = 0
            for run in runs:
                line = _line(flat, base + run, stride, per_voxel, copied[:size])
                _flag(line, background, limits, flags)
            some_words = nonzero[: _list_words(words, nonzero)]
            count += _list_flags(words, some_words, row * len(limits), hits[count:])
        row += 1
    return row, _unravel(plan, hits[:count], candidates)


@numba_jit
def _unravel(plan, hits, candidates):
    """Turn indices of flags into candidates, as ``find_candidates``; returns how many there are."""
    _, height, width = plan.shape
    per_voxel, count = len(plan.limits) // plan.rows.width, len(hits)
    numbers = np.empty(count, np.int64)
    _divide(hits, per_voxel, numbers, candidates[3, :count])
    if per_voxel > 1 and plan.activation != NONE:
        count = _drop_repeated(numbers)
    rows = hits[:count]
    _divide(numbers[:count], width, rows, candidates[2, :count])
    _divide(rows, height, candidates[0, :count], candidates[1, :count])
    return count
