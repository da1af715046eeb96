"""scores -> probabilities, compiled: numbers of any type, and what activations make of them.

Numbers come as one line of memory with a step per axis, so any layout is read where it lies. Types
of 16 bits come as their bits, with a table of what each of these means; otherwise it is None.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import Final, no_type_check

import numpy as np

from app.compiled import compiled

NONE: Final = 0
SIGMOID: Final = 1
SOFTMAX: Final = 2

_LN2: Final = float(np.log(2.0))
_TO_INTEGER: Final = 1.5 * 2.0**52
"""Added to a number, this rounds it, and leaves it as an integer in the lowest bits."""


@compiled
@no_type_check
def value(line, table, index):
    """Read a number of either kind of line."""
    return np.float32(line[index]) if table is None else table[line[index]]


@compiled
@no_type_check
def _exp(x):
    """Compute exp(x) for x in [-700, 0], to 2e-10 of itself: as good as exact in float32.

    exp(x) = 2^n exp(r) with |r| <= ln(2) / 2. The series of exp(r) up to r^8 is summed in pairs
    (Estrin's scheme), as the processor waits for every step of Horner's.
    """
    shifted = x * (1 / _LN2) + _TO_INTEGER
    r = x - (shifted - _TO_INTEGER) * _LN2
    r2 = r * r
    low = (1.0 + r) + (1 / 2 + r * (1 / 6)) * r2
    high = (1 / 24 + r * (1 / 120)) + (1 / 720 + r * (1 / 5040) + r2 * (1 / 40320)) * r2
    series = low + high * (r2 * r2)
    return series * np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)


@compiled
@no_type_check
def read_voxels(scores, base, voxels, activation, probabilities, sums):
    """Compute the probabilities of some voxels of a row; NaN where a score is no number.

    Args:
        scores: Line, table and steps.
        base: Where the row begins.
        voxels: Which voxels.
        activation: What turns scores into probabilities.
        probabilities: By channel, then voxel; is written.
        sums: Room for two numbers per voxel.
    """
    line, table, steps = scores
    for channel in range(len(probabilities)):
        start, row = base + channel * steps[0], probabilities[channel]
        for voxel in range(len(voxels)):
            row[voxel] = value(line, table, start + voxels[voxel] * steps[3])
        if activation == SIGMOID:
            for voxel in range(len(voxels)):
                score = row[voxel]
                small = _exp(-min(abs(score), 700.0))  # e^-|s|: at most 1, whatever the score.
                row[voxel] = (1.0 if score >= 0 else small) / (1.0 + small)
    if activation == SOFTMAX:
        _softmax(probabilities, len(voxels), sums[0], sums[1])


@compiled
@no_type_check
def _softmax(table, size, highest, total):
    """Turn columns of scores into probabilities in place; the loops become vector instructions."""
    highest[:size], total[:size] = -np.inf, 0.0
    for row in table:
        for x in range(size):
            highest[x] = max(highest[x], row[x])
    for row in table:
        for x in range(size):
            below = row[x] - highest[x]
            row[x] = _exp(max(-700.0, below))
            total[x] += row[x] + (below - below)  # NaN if any score is, or is infinite.
    for row in table:
        for x in range(size):
            row[x] /= total[x]
