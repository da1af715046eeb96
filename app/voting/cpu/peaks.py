"""votes -> cells -> peaks, compiled: the loops of ``app.voting.peaks``.

Every term is a whole number of fixed-point units and every sum stays below 2^53, so float64 holds
each sum exactly and the order of the votes changes no bit.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import no_type_check

import numpy as np

from app.compute import numba_jit


@numba_jit
@no_type_check
def _number_cells(landmark, position, edge, shape, first, numbers):
    """Say which cell each vote is in; -1 for none. In float64 all of it is vector instructions."""
    end = (shape[0] - 1.0, shape[1] - 1.0, shape[2] - 1.0)
    for vote in range(len(numbers)):
        i = np.floor((position[0][vote] - first[0] + 0.5) / edge[0])
        j = np.floor((position[1][vote] - first[1] + 0.5) / edge[1])
        k = np.floor((position[2][vote] - first[2] + 0.5) / edge[2])
        inside = (i >= 1.0) & (i < end[0]) & (j >= 1.0) & (j < end[1]) & (k >= 1.0) & (k < end[2])
        number = ((landmark * (end[0] + 1.0) + i) * (end[1] + 1.0) + j) * (end[2] + 1.0) + k
        numbers[vote] = np.int64(number if inside else -1.0)


@numba_jit
@no_type_check
def count_cells(starts, position, weight, edge, shape, first, table):
    """Add up the votes in each cell that is hit.

    Args:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Of each vote, (3 votes), in grid voxels.
        weight: Of each vote, in fixed-point units.
        edge: Of a cell along each axis, in grid voxels.
        shape: Cells along each axis; votes in the outermost ones, or past them, are left out.
        first: Grid index of the first voxel of the first cell.
        table: A zero for every cell of every landmark; holds 1, 2, … for those hit, afterwards.

    Returns:
        Numbers of the cells that are hit, in the order of their first vote, and their sums.
    """
    in_cell = np.empty(len(weight), dtype=np.int64)
    for mine in range(len(starts) - 1):
        votes = slice(starts[mine], starts[mine + 1])
        places = (position[0, votes], position[1, votes], position[2, votes])
        _number_cells(mine, places, edge, shape, first, in_cell[votes])
    numbers = np.empty(len(weight), dtype=np.int64)
    totals = np.empty(len(weight), dtype=np.float64)
    count = 0
    for vote in range(len(weight)):
        number = in_cell[vote]
        if number < 0:
            continue
        if table[number] == 0:
            numbers[count], totals[count] = number, 0.0
            count += 1
            table[number] = count
        totals[table[number] - 1] += weight[vote]
    return numbers[:count], totals[:count]


@numba_jit
@no_type_check
def weigh_cells(numbers, totals, table, shape):
    """Add up the votes in cells and around them, so that a peak at a corner of eight is one.

    The weights are a triangle along each axis, 1 2 1.

    Args:
        numbers: Of the cells.
        totals: Votes of every cell that is hit, as the table counts them.
        table: Of every cell of every landmark: 1, 2, … for those hit, else 0.
        shape: Cells along each axis.

    Returns:
        The height of each cell.
    """
    heights = np.zeros(len(numbers), dtype=np.float64)
    for cell in range(len(numbers)):
        for di in range(-1, 2):
            for dj in range(-1, 2):
                for dk in range(-1, 2):
                    other = table[numbers[cell] + (di * shape[1] + dj) * shape[2] + dk]
                    if other:
                        share = (2 - abs(di)) * (2 - abs(dj)) * (2 - abs(dk))
                        heights[cell] += share * totals[other - 1]
    return heights


@numba_jit
@no_type_check
def choose_peaks(landmark, centre, height, reach, peaks):
    """Choose the highest cell of each landmark, then the highest out of its reach, and so on.

    Args:
        landmark: Of each cell.
        centre: Of each cell, (3 cells), in mm; ties go to the first.
        height: Of each cell; is changed.
        reach: How far a peak hides other cells, in mm.
        peaks: Centres, (3 landmarks modes), NaN; is written.
    """
    highest = np.empty(peaks.shape[1], dtype=np.int64)
    for mode in range(peaks.shape[2]):
        highest[:] = -1
        for cell in range(len(height)):
            best = highest[landmark[cell]]
            if height[cell] > (height[best] if best >= 0 else 0.0):
                highest[landmark[cell]] = cell
        for mine in range(len(highest)):
            if highest[mine] >= 0:
                peaks[:, mine, mode] = centre[:, highest[mine]]
        for cell in range(len(height)):
            top = highest[landmark[cell]]
            if top >= 0:
                x = centre[0, cell] - centre[0, top]
                y = centre[1, cell] - centre[1, top]
                z = centre[2, cell] - centre[2, top]
                if x * x + y * y + z * z <= reach * reach:
                    height[cell] = 0.0
