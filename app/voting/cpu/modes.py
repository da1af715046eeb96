"""Votes -> modes, compiled: the loops of ``app.voting.modes``.

Every term of a sum is a whole number of fixed-point units and every sum stays below 2^53, so
float64 holds each sum exactly and the order of the votes changes no bit.
"""

from typing import Final

import numpy as np

from app.compute import numba_jit
from app.geometry import ON_FACE
from app.voting.cpu.activations import TO_INTEGER

TERMS: Final = 13
"""Sums per mode: weight; distance (x y z); source (x y z); products of distances (xx, xy, xz, yy,
yz, zz). They begin at columns 0, 1, 4 and 7."""

TO_INTEGER_BITS: Final = int(np.float64(TO_INTEGER).view(np.int64))
"""The bits of ``TO_INTEGER``: less these, those of its sum with a number are that number."""


@numba_jit
def sum_votes(starts, position, source, weight, centres, unit, reach, first, last):
    """Sum the terms of each mode over the votes within reach of it.

    Args:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Position of each vote, (3 votes), in grid voxels.
        source: Source of each vote, (3 votes), in grid voxels.
        weight: Weight of each vote, in fixed-point units.
        centres: Centres of the modes, (landmarks modes 3), in reaches; NaN where there is none.
        unit: Reaches per grid voxel along each axis.
        reach: How far around a mode votes count, in reaches.
        first: First vote to sum.
        last: Vote to stop before.

    Returns:
        Weights, and the other ``TERMS`` times weight, in reaches from the mode, (landmarks modes
        terms).
    """
    sums = np.zeros((*centres.shape[:2], TERMS))
    for landmark in range(len(centres)):
        begin, end = max(first, starts[landmark]), min(last, starts[landmark + 1])
        for mode in range(centres.shape[1]):
            if begin < end and not np.isnan(centres[landmark, mode, 0]):
                places = _range(position, begin, end), _range(source, begin, end)
                around = (centres[landmark, mode], unit, reach)
                sums[landmark, mode] = _sum_terms(*places, weight[begin:end], *around)
    return sums


@numba_jit
def _range(columns, begin, end):
    """Take a range of three columns one by one: one of a table might have gaps for the compiler."""
    return columns[0, begin:end], columns[1, begin:end], columns[2, begin:end]


@numba_jit
def _whole(number):
    """Round to the nearest whole number, an integer; for numbers below 2^51."""
    return np.float64(number + TO_INTEGER).view(np.int64) - TO_INTEGER_BITS


@numba_jit
def _sum_terms(position, source, weight, centre, unit, reach):
    """Sum ``TERMS`` over votes within reach of a mode.

    There are no branches, sums are of integers, which may be added in any order, and columns are
    known to have no gaps: so the compiler vectorises the loop, which makes it five times as fast.
    """
    total, x_sum, y_sum, z_sum, i_sum, j_sum, k_sum = 0, 0, 0, 0, 0, 0, 0
    xx, xy, xz, yy, yz, zz = 0, 0, 0, 0, 0, 0
    for vote in range(len(weight)):
        x = position[0][vote] * unit[0] - centre[0]
        y = position[1][vote] * unit[1] - centre[1]
        z = position[2][vote] * unit[2] - centre[2]
        w = weight[vote] if x * x + y * y + z * z <= reach * reach else 0.0
        total += _whole(w)
        x_sum += _whole(w * x)
        y_sum += _whole(w * y)
        z_sum += _whole(w * z)
        i_sum += _whole(w * (source[0][vote] * unit[0] - centre[0]))
        j_sum += _whole(w * (source[1][vote] * unit[1] - centre[1]))
        k_sum += _whole(w * (source[2][vote] * unit[2] - centre[2]))
        xx += _whole(w * x * x)
        xy += _whole(w * x * y)
        xz += _whole(w * x * z)
        yy += _whole(w * y * y)
        yz += _whole(w * y * z)
        zz += _whole(w * z * z)
    return total, x_sum, y_sum, z_sum, i_sum, j_sum, k_sum, xx, xy, xz, yy, yz, zz


@numba_jit
def stand_still(sums, settled):
    """Test whether no mode would move by more than ``settled``; one without votes does not."""
    for terms in sums.reshape(-1, TERMS):
        for axis in range(1, 4):
            if abs(terms[axis] / terms[0]) > settled:
                return False
    return True


@numba_jit
def move_modes(centres, sums, reach):
    """Move modes to the mean of the votes that were summed; merge those near to a higher one.

    Args:
        centres: Of the modes, (landmarks modes 3), in reaches; changed. A mode without votes, and
            one that is merged, becomes NaN.
        sums: What ``sum_votes`` summed there.
        reach: How near to a higher mode others are merged with it.
    """
    for landmark in range(len(centres)):
        for mode in range(centres.shape[1]):
            terms = sums[landmark, mode]
            for axis in range(3):
                centres[landmark, mode, axis] += terms[1 + axis] / terms[0]
            if _is_near_earlier(centres[landmark], sums[landmark], mode, reach):
                centres[landmark, mode] = np.nan


@numba_jit
def describe_modes(centres, sums, spacing, reach, square):
    """Rank the modes of each landmark, drop those within reach of a heavier one, describe the rest.

    Args:
        centres: Of the modes, (landmarks modes 3), in reaches; put in order.
        sums: What ``sum_votes`` summed there; put in order, and 0 where modes are dropped.
        spacing: Of the grid, in mm.
        reach: In mm.
        square: Of the reach.

    Returns:
        Position, source and covariance, as of ``Modes``.
    """
    position, source = np.empty(centres.shape), np.empty(centres.shape)
    covariance = np.empty((*centres.shape, 3))
    for landmark in range(len(centres)):
        _sort_modes(centres[landmark], sums[landmark])
        for mode in range(1, centres.shape[1]):
            if _is_near_earlier(centres[landmark], sums[landmark], mode, 1.0):
                sums[landmark, mode] = 0.0
        _sort_modes(centres[landmark], sums[landmark])
        for mode in range(centres.shape[1]):
            terms, column = sums[landmark, mode], 7
            for a in range(3):
                # Without votes, 0 / 0 gives NaN, but a mode may have been somewhere.
                at = centres[landmark, mode, a] * reach / spacing[a] if terms[0] > 0 else np.nan
                position[landmark, mode, a] = at
                source[landmark, mode, a] = at + terms[4 + a] / terms[0] * reach / spacing[a]
                for b in range(a, 3):
                    product = terms[column] / terms[0] * square
                    covariance[landmark, mode, a, b] = covariance[landmark, mode, b, a] = product
                    column += 1
    return position, source, covariance


@numba_jit
def _is_near_earlier(centres, sums, mode, reach):
    """Test whether a mode is less than a reach from an earlier one that has votes; NaN is not."""
    for other in range(mode):
        x = centres[other, 0] - centres[mode, 0]
        y = centres[other, 1] - centres[mode, 1]
        z = centres[other, 2] - centres[mode, 2]
        if sums[other, 0] > 0 and x * x + y * y + z * z < reach * reach:
            return True
    return False


@numba_jit
def _sort_modes(centres, sums):
    """Order modes, the heaviest first; of equal ones the earlier."""
    for last in range(1, len(sums)):
        for mode in range(last, 0, -1):
            if sums[mode, 0] > sums[mode - 1, 0]:
                for columns in (centres, sums):
                    for column in range(columns.shape[1]):
                        above = columns[mode - 1, column]
                        columns[mode - 1, column] = columns[mode, column]
                        columns[mode, column] = above


@numba_jit
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
def _is_inside(to_scan, i, j, k, shape):
    """Test whether a voxel lies in the scan, as ``app.geometry.is_inside`` does of a point."""
    inside = True
    for axis in range(3):
        a, b, c, first = to_scan[axis]
        at = a * i + b * j + c * k + first
        inside &= -0.5 - ON_FACE <= at <= shape[axis] - 0.5 + ON_FACE
    return inside
