"""votes + centres -> sums, compiled: the loops of ``app.modes``.

Every term is a whole number of fixed-point units and every sum stays below 2^53, so float64 holds
each sum exactly and the order of the votes changes no bit.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import Final, no_type_check

import numpy as np

from app.compiled import compiled

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

TERMS: Final = 10
"""Sums per mode: weight, three of source, six products of distances (xx, xy, xz, yy, yz, zz)."""


@compiled
@no_type_check
def _list_modes(centres):
    """List the modes of each landmark that there are; returns them and how many they are."""
    modes = np.empty(centres.shape[:2], dtype=np.int64)
    counts = np.zeros(len(centres), dtype=np.int64)
    for mine in range(len(centres)):
        for mode in range(centres.shape[1]):
            if not np.isnan(centres[mine, mode, 0]):
                modes[mine, counts[mine]] = mode
                counts[mine] += 1
    return modes, counts


@compiled
@no_type_check
def sum_near(landmark, position, weight, centres, unit, reach, first, last):
    """Sum weight and distance of the votes within reach of each mode.

    Args:
        landmark: Of each vote.
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
    modes, counts = _list_modes(centres)
    for vote in range(first, last):
        mine = landmark[vote]
        x = position[0, vote] * unit[0]
        y = position[1, vote] * unit[1]
        z = position[2, vote] * unit[2]
        for number in range(counts[mine]):
            mode = modes[mine, number]
            dx = x - centres[mine, mode, 0]
            dy = y - centres[mine, mode, 1]
            dz = z - centres[mine, mode, 2]
            if dx * dx + dy * dy + dz * dz <= reach * reach:
                sums[mine, mode, 0] += weight[vote]
                sums[mine, mode, 1] += np.rint(weight[vote] * dx)
                sums[mine, mode, 2] += np.rint(weight[vote] * dy)
                sums[mine, mode, 3] += np.rint(weight[vote] * dz)
    return sums


@compiled
@no_type_check
def sum_up(landmark, position, source, weight, centres, unit, first, last):
    """Sum all that is known of each mode over the votes within one reach of it.

    Args:
        landmark: Of each vote.
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
    modes, counts = _list_modes(centres)
    for vote in range(first, last):
        mine = landmark[vote]
        mass = weight[vote]
        for number in range(counts[mine]):
            mode = modes[mine, number]
            x = position[0, vote] * unit[0] - centres[mine, mode, 0]
            y = position[1, vote] * unit[1] - centres[mine, mode, 1]
            z = position[2, vote] * unit[2] - centres[mine, mode, 2]
            if not x * x + y * y + z * z <= 1.0:
                continue
            terms = sums[mine, mode]
            terms[0] += mass
            terms[1] += np.rint(mass * (source[0, vote] * unit[0] - centres[mine, mode, 0]))
            terms[2] += np.rint(mass * (source[1, vote] * unit[1] - centres[mine, mode, 1]))
            terms[3] += np.rint(mass * (source[2, vote] * unit[2] - centres[mine, mode, 2]))
            terms[4] += np.rint(mass * x * x)
            terms[5] += np.rint(mass * x * y)
            terms[6] += np.rint(mass * x * z)
            terms[7] += np.rint(mass * y * y)
            terms[8] += np.rint(mass * y * z)
            terms[9] += np.rint(mass * z * z)
            terms[10] += np.rint(mass * x)
            terms[11] += np.rint(mass * y)
            terms[12] += np.rint(mass * z)
    return sums


@compiled
@no_type_check
def _is_near(places, mine, mode, other, reach):
    """Say whether two modes of a landmark are less than a reach apart; NaN is not."""
    square = 0.0
    for axis in range(3):
        square += (places[mine, mode, axis] - places[mine, other, axis]) ** 2
    return square < reach * reach


@compiled
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


@compiled
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


@compiled
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
