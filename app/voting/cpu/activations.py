"""Scores -> probabilities, compiled."""

from typing import Final

import numpy as np

from app.compute import numba_jit, value

NONE: Final = 0
SIGMOID: Final = 1
SOFTMAX: Final = 2

_LN2: Final = float(np.log(2.0))
TO_INTEGER: Final = 1.5 * 2.0**52
"""Added to a number, this rounds it and leaves it as an integer in the lowest bits."""


@numba_jit
def _exp(x):
    """Compute exp(x) for x in [-700, 0], with a relative error of 2e-10: exact to float32.

    exp(x) = 2^n exp(r) with |r| <= ln(2) / 2. The series of exp(r) up to r^8 is summed in pairs
    (Estrin's scheme), as the processor would wait for every step of Horner's.
    """
    shifted = x * (1 / _LN2) + TO_INTEGER
    r = x - (shifted - TO_INTEGER) * _LN2
    r2 = r * r
    low = (1.0 + r) + (1 / 2 + r * (1 / 6)) * r2
    high = (1 / 24 + r * (1 / 120)) + (1 / 720 + r * (1 / 5040) + r2 * (1 / 40320)) * r2
    series = low + high * (r2 * r2)
    return series * np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)


@numba_jit
def read_voxels(scores, starts, activation, probabilities, sums):
    """Compute the probabilities of some voxels; NaN where a score is not a number.

    Args:
        scores: A ``Flat``.
        starts: Index of each voxel's first score.
        activation: What turns scores into probabilities.
        probabilities: (channels voxels), written.
        sums: Workspace of two numbers per voxel.
    """
    numbers, strides = scores
    count = len(starts)
    for channel in range(len(probabilities)):
        _read(numbers, starts, channel * strides[0], probabilities[channel, :count])
        if activation == SIGMOID:
            _to_sigmoid(probabilities[channel, :count])
    if activation == SOFTMAX:
        _to_softmax(probabilities, sums[0, :count], sums[1, :count])


# Each of these is one loop over one row in a function of its own: only such loops are vectorised.
# And only for ``table[channel, :count]``: a row of ``table[:, :count]`` may, for all the compiler
# knows, have gaps between its numbers.


@numba_jit
def _read(numbers, starts, shift, row):
    for x in range(len(row)):
        row[x] = value(numbers, starts[x] + shift)


@numba_jit
def _to_sigmoid(row):
    for x in range(len(row)):
        score = row[x]
        small = _exp(-min(abs(score), 700.0))  # e^-|s|: at most 1, whatever the score.
        row[x] = (1.0 if score >= 0 else small) / (1.0 + small)


@numba_jit
def _to_softmax(table, highest, total):
    """Turn columns of scores into probabilities in place."""
    count = len(total)
    highest[:], total[:] = -np.inf, 0.0
    for channel in range(len(table)):
        _raise_to(highest, table[channel, :count])
    for channel in range(len(table)):
        _exp_below(table[channel, :count], highest)
        _add_to(total, table[channel, :count])
    for channel in range(len(table)):
        _divide(table[channel, :count], total)


@numba_jit
def _raise_to(highest, row):
    for x in range(len(row)):
        highest[x] = max(highest[x], row[x])


@numba_jit
def _exp_below(row, highest):
    for x in range(len(row)):
        below = row[x] - highest[x]  # NaN of scores that are none; -inf is as good as any low one.
        row[x] = _exp(max(-700.0, below)) if below <= 0.0 else below


@numba_jit
def _add_to(total, row):
    for x in range(len(row)):
        total[x] += row[x]


@numba_jit
def _divide(row, total):
    for x in range(len(row)):
        row[x] /= total[x]
