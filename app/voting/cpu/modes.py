"""votes + centres -> sums, compiled: the loops of ``app.voting.modes``.

Every term is a whole number of fixed-point units and every sum stays below 2^53, so float64 holds
each sum exactly and the order of the votes changes no bit.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import Final, no_type_check

import numpy as np

from app.compute import numba_jit
from app.voting.cpu.activations import TO_INTEGER

SHIFTS: Final = 5
"""Most mean-shift steps; clean modes stand still after two."""

FIRST_LOOK: Final = 0.25
"""How far around a peak's cell the first step looks, in reaches: enough for the tip of a mode, and
not as far as the next one."""

FIRST_REST: Final = 2
"""Clean modes stand still after as many steps: from then on all is summed at once, which spares a
pass if they do."""

SETTLED: Final = 1e-6
"""No mode moved by more of a reach than this: further steps would not change the answer."""

MEETING: Final = 0.5
"""After the first step, modes less than so many reaches apart are about to meet."""

TO_INTEGER_BITS: Final = int(np.float64(TO_INTEGER).view(np.int64))
"""Above these, the sum of a number and ``TO_INTEGER`` holds it as an integer."""

TERMS: Final = 10
"""Sums per mode: weight, three of source, six products of distances (xx, xy, xz, yy, yz, zz)."""


@numba_jit
@no_type_check
def sum_near(starts, position, weight, centres, unit, reach, first, last):
    """Sum weight and distance of the votes within reach of each mode.

    Args:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Of each vote, (3 votes), in grid voxels.
        weight: Of each vote, in fixed-point units.
        centres: Of the modes, (landmarks modes 3), in reaches; NaN where there is none.
        unit: Reaches per grid voxel along each axis.
        reach: How far to look, in reaches.
        first: First vote that is looked at.
        last: Vote to stop before.

    Returns:
        Weight, and distance times weight along each axis, (landmarks modes 4).
    """
    sums = np.zeros((*centres.shape[:2], 4))
    for mine in range(len(centres)):
        begin, end = max(first, starts[mine]), min(last, starts[mine + 1])
        for mode in range(centres.shape[1]):
            if begin < end and not np.isnan(centres[mine, mode, 0]):
                votes = (_cut(position, begin, end), weight[begin:end])
                sums[mine, mode] = _sum_near(*votes, centres[mine, mode], unit, reach)
    return sums


@numba_jit
@no_type_check
def sum_up(starts, position, source, weight, centres, unit, first, last):
    """Sum all that is known of each mode over the votes within one reach of it.

    Args:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Of each vote, (3 votes), in grid voxels.
        source: Of each vote, (3 votes), in grid voxels.
        weight: Of each vote, in fixed-point units.
        centres: Of the modes, (landmarks modes 3), in reaches; NaN where there is none.
        unit: Reaches per grid voxel along each axis.
        first: First vote that is looked at.
        last: Vote to stop before.

    Returns:
        The ``TERMS``, distances in reaches from the mode, and behind them what ``sum_near`` would
        say of the distance, (landmarks modes terms).
    """
    sums = np.zeros((*centres.shape[:2], TERMS + 3))
    for mine in range(len(centres)):
        begin, end = max(first, starts[mine]), min(last, starts[mine + 1])
        for mode in range(centres.shape[1]):
            if begin < end and not np.isnan(centres[mine, mode, 0]):
                votes = (_cut(position, begin, end), weight[begin:end])
                mode_of = (centres[mine, mode], unit, 1.0)
                near, terms = _sum_near(*votes, *mode_of), sums[mine, mode]
                terms[0], terms[10:] = near[0], near[1:]
                terms[1:4] = _sum_sources(_cut(source, begin, end), *votes, *mode_of)
                terms[4:10] = _sum_squares(*votes, *mode_of)
    return sums


# Nothing jumps here, sums are of integers, which may be added in any order, and columns are known
# to have no gaps: so the compiler turns these loops into vector instructions, five times as fast.


@numba_jit
@no_type_check
def _cut(columns, begin, end):
    """Cut three columns one by one: a part of a table may, for all that is known, have gaps."""
    return columns[0, begin:end], columns[1, begin:end], columns[2, begin:end]


@numba_jit
@no_type_check
def _whole(number):
    """Round to the nearest whole number, an integer; for numbers below 2^51."""
    return np.float64(number + TO_INTEGER).view(np.int64) - TO_INTEGER_BITS


@numba_jit
@no_type_check
def _look(position, weight, centre, unit, reach, vote):
    """Say how far a vote is from a mode, and what it counts there: nothing out of reach."""
    x = position[0][vote] * unit[0] - centre[0]
    y = position[1][vote] * unit[1] - centre[1]
    z = position[2][vote] * unit[2] - centre[2]
    return x, y, z, weight[vote] if x * x + y * y + z * z <= reach * reach else 0.0


@numba_jit
@no_type_check
def _sum_near(position, weight, centre, unit, reach):
    """Sum weights, and distances times weights, of the votes within reach of a mode."""
    total, sum_x, sum_y, sum_z = 0, 0, 0, 0
    for vote in range(len(weight)):
        x, y, z, mass = _look(position, weight, centre, unit, reach, vote)
        total += _whole(mass)
        sum_x += _whole(mass * x)
        sum_y += _whole(mass * y)
        sum_z += _whole(mass * z)
    return total, sum_x, sum_y, sum_z


@numba_jit
@no_type_check
def _sum_sources(source, position, weight, centre, unit, reach):
    """Sum distances times weights of the voxels that cast these votes."""
    sum_x, sum_y, sum_z = 0, 0, 0
    for vote in range(len(weight)):
        _x, _y, _z, mass = _look(position, weight, centre, unit, reach, vote)
        sum_x += _whole(mass * (source[0][vote] * unit[0] - centre[0]))
        sum_y += _whole(mass * (source[1][vote] * unit[1] - centre[1]))
        sum_z += _whole(mass * (source[2][vote] * unit[2] - centre[2]))
    return sum_x, sum_y, sum_z


@numba_jit
@no_type_check
def _sum_squares(position, weight, centre, unit, reach):
    """Sum products of distances, times weights, of these votes: xx, xy, xz, yy, yz and zz."""
    xx, xy, xz, yy, yz, zz = 0, 0, 0, 0, 0, 0
    for vote in range(len(weight)):
        x, y, z, mass = _look(position, weight, centre, unit, reach, vote)
        xx += _whole(mass * x * x)
        xy += _whole(mass * x * y)
        xz += _whole(mass * x * z)
        yy += _whole(mass * y * y)
        yz += _whole(mass * y * z)
        zz += _whole(mass * z * z)
    return xx, xy, xz, yy, yz, zz


@numba_jit
@no_type_check
def sums_between(numbers, bounds):
    """Sum numbers from each bound to the next."""
    sums = np.zeros(len(bounds) - 1)
    for part in range(len(sums)):
        total = 0.0
        for number in numbers[bounds[part] : bounds[part + 1]]:
            total += number
        sums[part] = total
    return sums


@numba_jit
@no_type_check
def _is_near(places, mine, mode, other, reach):
    """Say whether two modes of a landmark are less than a reach apart; NaN is not."""
    square = 0.0
    for axis in range(3):
        square += (places[mine, mode, axis] - places[mine, other, axis]) ** 2
    return square < reach * reach


@numba_jit
@no_type_check
def merge(centres, reach):
    """Make modes NaN that are less than a reach from one before them.

    Args:
        centres: Of the modes, (landmarks modes 3), the best first; is changed.
        reach: In the unit of the centres.
    """
    for mine in range(len(centres)):
        for mode in range(1, centres.shape[1]):
            for other in range(mode):
                if _is_near(centres, mine, mode, other, reach):
                    centres[mine, mode] = np.nan


@numba_jit
@no_type_check
def rank(centres, weight, reach):
    """Order the modes of each landmark by weight, without those within reach of a heavier one.

    Args:
        centres: Of the modes, (landmarks modes 3).
        weight: Of the modes, (landmarks modes); of equal ones the first comes first.
        reach: In the unit of the centres.

    Returns:
        Numbers of the modes, heaviest first; -1 after the last.
    """
    order = np.full(weight.shape, -1, dtype=np.int64)
    for mine in range(len(weight)):
        count = 0
        for mode in np.argsort(-weight[mine], kind="mergesort"):
            free = weight[mine, mode] > 0
            for other in order[mine, :count]:
                free &= not _is_near(centres, mine, mode, other, reach)
            if free:
                order[mine, count] = mode
                count += 1
    return order


@numba_jit
@no_type_check
def count_voters(points, size, pitch, radius):
    """Count the field voxels of a grid within a radius of each point.

    Args:
        points: In field voxels, (points 3); NaN counts none.
        size: Field voxels along each axis.
        pitch: Their spacing along each axis, in mm.
        radius: In mm.
    """
    counts = np.zeros(len(points), dtype=np.float64)
    for point in range(len(points)):
        x, y, z = points[point]
        if not np.isfinite(x + y + z):
            continue
        for i in range(max(0, np.int64(np.ceil(x - radius / pitch[0]))), size[0]):
            rest = radius**2 - ((i - x) * pitch[0]) ** 2
            if i > x and rest < 0:
                break
            for j in range(max(0, np.int64(np.ceil(y - radius / pitch[1]))), size[1]):
                square = rest - ((j - y) * pitch[1]) ** 2
                if j > y and square < 0:
                    break
                if square >= 0:
                    half = np.sqrt(square) / pitch[2]
                    high = min(np.floor(z + half), size[2] - 1)
                    counts[point] += max(0.0, high - max(np.ceil(z - half), 0.0) + 1)
    return counts
