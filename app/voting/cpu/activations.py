"""scores -> probabilities, compiled: numbers of any type, and what activations make of them.

Numbers come as one line of memory with a step per axis, so any layout is read where it lies. NumPy
knows no bfloat16, and compilers no float16: these come as their bits, uint16 and int16.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import Final, no_type_check

import numpy as np
from numba.extending import overload
from numba.np.numpy_support import as_dtype

from app.compute import numba_jit

NONE: Final = 0
SIGMOID: Final = 1
SOFTMAX: Final = 2

_LN2: Final = float(np.log(2.0))
TO_INTEGER: Final = 1.5 * 2.0**52
"""Added to a number, this rounds it, and leaves it as an integer in the lowest bits."""

BFLOAT16: Final = np.dtype(np.uint16)
FLOAT16: Final = np.dtype(np.int16)
"""Types that numbers of 16 bits have as bits."""


@no_type_check
def value(line, index):
    """Read a number as float32."""
    return _way_of(line.dtype)(line, index)


@overload(value)
@no_type_check
def _value(line, index):  # noqa: ARG001 - named as those it chooses from
    """Let compiled code choose the way once, by the type of the line."""
    return _way_of(as_dtype(line.dtype))


@no_type_check
def _way_of(dtype):
    return {BFLOAT16: _of_bfloat16, FLOAT16: _of_float16}.get(dtype, _of_number)


@no_type_check
def _of_number(line, index):
    return np.float32(line[index])


@no_type_check
def _of_bfloat16(line, index):
    """It is the upper half of a float32."""
    return np.uint32(np.uint32(line[index]) << np.uint32(16)).view(np.float32)


@no_type_check
def _of_float16(line, index):
    """Put its bits where float32 has them, and make up for exponents that count from elsewhere."""
    bits = np.uint32(np.uint16(line[index]))
    size = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    finite = np.float32(size.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
    # Infinity and NaN have the highest exponent in either type.
    size = finite if size < np.uint32(0x0F800000) else np.uint32(size | np.uint32(0x7F800000))
    return np.uint32(size | ((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@numba_jit
@no_type_check
def _exp(x):
    """Compute exp(x) for x in [-700, 0], to 2e-10 of itself: as good as exact in float32.

    exp(x) = 2^n exp(r) with |r| <= ln(2) / 2. The series of exp(r) up to r^8 is summed in pairs
    (Estrin's scheme), as the processor waits for every step of Horner's.
    """
    shifted = x * (1 / _LN2) + TO_INTEGER
    r = x - (shifted - TO_INTEGER) * _LN2
    r2 = r * r
    low = (1.0 + r) + (1 / 2 + r * (1 / 6)) * r2
    high = (1 / 24 + r * (1 / 120)) + (1 / 720 + r * (1 / 5040) + r2 * (1 / 40320)) * r2
    series = low + high * (r2 * r2)
    return series * np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)


@numba_jit
@no_type_check
def read_voxels(scores, starts, activation, probabilities, sums):
    """Compute the probabilities of some voxels; NaN where a score is no number.

    Args:
        scores: Line and steps.
        starts: Where the voxels' first scores lie.
        activation: What turns scores into probabilities.
        probabilities: By channel, then voxel; is written.
        sums: Room for two numbers per voxel.
    """
    line, steps = scores
    count = len(starts)
    for channel in range(len(probabilities)):
        _read(line, starts, channel * steps[0], probabilities[channel, :count])
        if activation == SIGMOID:
            _to_sigmoid(probabilities[channel, :count])
    if activation == SOFTMAX:
        _to_softmax(probabilities, sums[0, :count], sums[1, :count])


# Each of these has one loop over one row, and is a function: only such loops become vector
# instructions. And only for ``table[channel, :count]``: a row of ``table[:, :count]`` may, for all
# the compiler knows, have gaps between its numbers.


@numba_jit
@no_type_check
def _read(line, starts, ahead, row):
    for x in range(len(row)):
        row[x] = value(line, starts[x] + ahead)


@numba_jit
@no_type_check
def _to_sigmoid(row):
    for x in range(len(row)):
        score = row[x]
        small = _exp(-min(abs(score), 700.0))  # e^-|s|: at most 1, whatever the score.
        row[x] = (1.0 if score >= 0 else small) / (1.0 + small)


@numba_jit
@no_type_check
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
@no_type_check
def _raise_to(highest, row):
    for x in range(len(row)):
        highest[x] = max(highest[x], row[x])


@numba_jit
@no_type_check
def _exp_below(row, highest):
    for x in range(len(row)):
        below = row[x] - highest[x]
        row[x] = _exp(max(-700.0, below)) + (below - below)  # NaN if it is, or is infinite.


@numba_jit
@no_type_check
def _add_to(total, row):
    for x in range(len(row)):
        total[x] += row[x]


@numba_jit
@no_type_check
def _divide(row, total):
    for x in range(len(row)):
        row[x] /= total[x]
