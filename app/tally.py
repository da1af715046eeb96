"""Ballots -> sums, compiled: the loops over votes that peaks and modes are found by.

Every term is a whole number of fixed-point units and every sum stays below 2^53, so float64 holds
each sum exactly and the order of the votes changes no bit.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import Final, no_type_check

import numpy as np
from numba import njit

TERMS: Final = 10
"""Sums per mode: weight, three of source, six products of distances (xx, xy, xz, yy, yz, zz)."""


@njit(cache=True, nogil=True, error_model="numpy")
@no_type_check
def count_cells(landmark, position, weight, edge, shape, first, table):
    """Add up the votes in each cell that is hit.

    Args:
        landmark: Of each vote.
        position: Of each vote, (3 votes), in grid voxels.
        weight: Of each vote.
        edge: Of a cell along each axis, in grid voxels.
        shape: Cells along each axis; votes in the outermost ones, or past them, are left out.
        first: Grid index of the first voxel of the first cell.
        table: A zero for every cell of every landmark; holds 1, 2, … for those hit, afterwards.

    Returns:
        Numbers of the cells that are hit, in the order of their first vote, and their sums.
    """
    numbers = np.empty(len(landmark), dtype=np.int64)
    totals = np.zeros(len(landmark), dtype=np.float64)
    count = 0
    for vote in range(len(landmark)):
        number = landmark[vote]
        inside = True
        for axis in range(3):
            place = np.floor((position[axis, vote] - first[axis] + 0.5) / edge[axis])
            inside &= 1 <= place < shape[axis] - 1
            number = number * shape[axis] + np.int64(place if inside else 0.0)
        if not inside:
            continue
        if table[number] == 0:
            numbers[count] = number
            count += 1
            table[number] = count
        totals[table[number] - 1] += weight[vote]
    return numbers[:count], totals[:count]


@njit(cache=True, nogil=True, error_model="numpy")
@no_type_check
def sum_near(landmark, position, weight, centres, unit, reach):
    """Sum weight and distance of the votes within reach of each mode.

    Args:
        landmark: Of each vote.
        position: Of each vote, (3 votes), in grid voxels.
        weight: Of each vote, in fixed-point units.
        centres: Of the modes, (landmarks modes 3), in reaches; NaN where there is none.
        unit: Reaches per grid voxel along each axis.
        reach: How far to look, in reaches.

    Returns:
        Weight, and distance times weight along each axis, (landmarks modes 4).
    """
    sums = np.zeros((*centres.shape[:2], 4))
    for vote in range(len(landmark)):
        mine = landmark[vote]
        x, y, z = (
            position[0, vote] * unit[0],
            position[1, vote] * unit[1],
            position[2, vote] * unit[2],
        )
        for mode in range(centres.shape[1]):
            dx = x - centres[mine, mode, 0]
            dy = y - centres[mine, mode, 1]
            dz = z - centres[mine, mode, 2]
            if dx * dx + dy * dy + dz * dz <= reach * reach:
                sums[mine, mode, 0] += weight[vote]
                sums[mine, mode, 1] += np.rint(weight[vote] * dx)
                sums[mine, mode, 2] += np.rint(weight[vote] * dy)
                sums[mine, mode, 3] += np.rint(weight[vote] * dz)
    return sums


@njit(cache=True, nogil=True, error_model="numpy")
@no_type_check
def sum_up(landmark, position, source, weight, centres, unit):
    """Sum all that is known of each mode over the votes within one reach of it.

    Args:
        landmark: Of each vote.
        position: Of each vote, (3 votes), in grid voxels.
        source: Of each vote, (3 votes), in grid voxels.
        weight: Of each vote, in fixed-point units.
        centres: Of the modes, (landmarks modes 3), in reaches; NaN where there is none.
        unit: Reaches per grid voxel along each axis.

    Returns:
        The ``TERMS``, (landmarks modes terms), distances in reaches from the mode.
    """
    sums = np.zeros((*centres.shape[:2], TERMS))
    distance = np.empty(3)
    for vote in range(len(landmark)):
        mine = landmark[vote]
        for mode in range(centres.shape[1]):
            square = 0.0
            for axis in range(3):
                distance[axis] = position[axis, vote] * unit[axis] - centres[mine, mode, axis]
                square += distance[axis] * distance[axis]
            if not square <= 1.0:
                continue
            sums[mine, mode, 0] += weight[vote]
            term = 4
            for axis in range(3):
                away = source[axis, vote] * unit[axis] - centres[mine, mode, axis]
                sums[mine, mode, 1 + axis] += np.rint(weight[vote] * away)
                for other in range(axis, 3):
                    product = weight[vote] * distance[axis] * distance[other]
                    sums[mine, mode, term] += np.rint(product)
                    term += 1
    return sums
