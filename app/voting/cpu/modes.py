"""Votes -> sums around modes, compiled: the loops of ``app.voting.modes``.

Every term is a whole number of fixed-point units and every sum stays below 2^53, so float64 holds
each sum exactly and the order of the votes changes no bit.
"""

from typing import Final, no_type_check

import numpy as np

from app.compute import numba_jit
from app.voting.cpu.activations import TO_INTEGER
from app.voting.readout import TERMS

TO_INTEGER_BITS: Final = int(np.float64(TO_INTEGER).view(np.int64))
"""The bits of ``TO_INTEGER``: less these, those of its sum with a number are that number."""


@numba_jit
@no_type_check
def sum_near(starts, position, weight, centres, unit, reach, first, last):
    """Sum weight and distance of the votes within reach of each mode.

    Args:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Position of each vote, (3 votes), in grid voxels.
        weight: Weight of each vote, in fixed-point units.
        centres: Centres of the modes, (landmarks modes 3), in reaches; NaN where there is none.
        unit: Reaches per grid voxel along each axis.
        reach: How far around a mode votes count, in reaches.
        first: First vote to sum.
        last: Vote to stop before.

    Returns:
        Weight, and distance times weight along each axis, (landmarks modes 4).
    """
    sums = np.zeros((*centres.shape[:2], 4))
    for landmark in range(len(centres)):
        begin, end = max(first, starts[landmark]), min(last, starts[landmark + 1])
        for mode in range(centres.shape[1]):
            if begin < end and not np.isnan(centres[landmark, mode, 0]):
                votes = (_range(position, begin, end), weight[begin:end])
                sums[landmark, mode] = _sum_near(*votes, centres[landmark, mode], unit, reach)
    return sums


@numba_jit
@no_type_check
def sum_all(starts, position, source, weight, centres, unit, first, last):
    """Sum all terms of each mode over the votes within one reach of it.

    Args:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Position of each vote, (3 votes), in grid voxels.
        source: Source of each vote, (3 votes), in grid voxels.
        weight: Weight of each vote, in fixed-point units.
        centres: Centres of the modes, (landmarks modes 3), in reaches; NaN where there is none.
        unit: Reaches per grid voxel along each axis.
        first: First vote to sum.
        last: Vote to stop before.

    Returns:
        The ``TERMS``, distances in reaches from the mode, followed by the distances that
        ``sum_near`` sums, (landmarks modes terms).
    """
    sums = np.zeros((*centres.shape[:2], TERMS + 3))
    for landmark in range(len(centres)):
        begin, end = max(first, starts[landmark]), min(last, starts[landmark + 1])
        for mode in range(centres.shape[1]):
            if begin < end and not np.isnan(centres[landmark, mode, 0]):
                votes = (_range(position, begin, end), weight[begin:end])
                around = (centres[landmark, mode], unit, 1.0)
                near, terms = _sum_near(*votes, *around), sums[landmark, mode]
                terms[0], terms[10:] = near[0], near[1:]
                terms[1:4] = _sum_sources(_range(source, begin, end), *votes, *around)
                terms[4:10] = _sum_squares(*votes, *around)
    return sums


# There are no branches here, sums are of integers, which may be added in any order, and columns are
# known to have no gaps: so the compiler vectorises these loops, which makes them five times as
# fast.


@numba_jit
@no_type_check
def _range(columns, begin, end):
    """Take a range of three columns one by one: one of a table might have gaps for the compiler."""
    return columns[0, begin:end], columns[1, begin:end], columns[2, begin:end]


@numba_jit
@no_type_check
def _whole(number):
    """Round to the nearest whole number, an integer; for numbers below 2^51."""
    return np.float64(number + TO_INTEGER).view(np.int64) - TO_INTEGER_BITS


@numba_jit
@no_type_check
def _distance(position, weight, centre, unit, reach, vote):
    """Return how far a vote is from a mode, and its weight there: 0 out of reach."""
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
        x, y, z, w = _distance(position, weight, centre, unit, reach, vote)
        total += _whole(w)
        sum_x += _whole(w * x)
        sum_y += _whole(w * y)
        sum_z += _whole(w * z)
    return total, sum_x, sum_y, sum_z


@numba_jit
@no_type_check
def _sum_sources(source, position, weight, centre, unit, reach):
    """Sum distances times weights of the voxels that cast these votes."""
    sum_x, sum_y, sum_z = 0, 0, 0
    for vote in range(len(weight)):
        _x, _y, _z, w = _distance(position, weight, centre, unit, reach, vote)
        sum_x += _whole(w * (source[0][vote] * unit[0] - centre[0]))
        sum_y += _whole(w * (source[1][vote] * unit[1] - centre[1]))
        sum_z += _whole(w * (source[2][vote] * unit[2] - centre[2]))
    return sum_x, sum_y, sum_z


@numba_jit
@no_type_check
def _sum_squares(position, weight, centre, unit, reach):
    """Sum products of distances, times weights, of these votes: xx, xy, xz, yy, yz and zz."""
    xx, xy, xz, yy, yz, zz = 0, 0, 0, 0, 0, 0
    for vote in range(len(weight)):
        x, y, z, w = _distance(position, weight, centre, unit, reach, vote)
        xx += _whole(w * x * x)
        xy += _whole(w * x * y)
        xz += _whole(w * x * z)
        yy += _whole(w * y * y)
        yz += _whole(w * y * z)
        zz += _whole(w * z * z)
    return xx, xy, xz, yy, yz, zz


@numba_jit
@no_type_check
def count_voters(points, size, pitch, radius, to_scan, shape):
    """Count the field voxels of a grid within a radius of each point, and inside the scan.

    Args:
        points: In field voxels, (points 3); NaN counts none.
        size: Field voxels along each axis.
        pitch: Their spacing along each axis, in mm.
        radius: In mm.
        to_scan: Field voxel index -> index of the scan, (4 4).
        shape: Of the scan, in voxels; none, if all of the grid lies in it.
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
                    low, high = max(np.ceil(z - half), 0.0), min(np.floor(z + half), size[2] - 1.0)
                    if len(shape) == 0:
                        counts[point] += max(0.0, high - low + 1)
                        continue
                    for k in range(np.int64(low), np.int64(high) + 1):
                        counts[point] += _is_inside(to_scan, i, j, k, shape)
    return counts


@numba_jit
@no_type_check
def _is_inside(to_scan, i, j, k, shape):
    """Test whether a voxel lies in the scan, up to the faces of its outermost voxels."""
    inside = True
    for axis in range(3):
        a, b, c, first = to_scan[axis]
        inside &= -0.5 <= a * i + b * j + c * k + first <= shape[axis] - 0.5
    return inside
