"""Votes -> groups by landmark -> cells -> peaks, compiled: the loops of ``app.voting.peaks``.

Every term is a whole number of fixed-point units and every sum stays below 2^53, so float64 holds
each sum exactly and the order of the votes changes no bit.
"""

from typing import no_type_check

import numpy as np

from app.compute import numba_jit


@numba_jit
@no_type_check
def count_votes(landmark, starts):
    """Count the votes of each landmark.

    Args:
        landmark: Landmark of each vote.
        starts: Zeros, one more than landmarks; written: where each landmark's votes begin.
    """
    for vote in range(len(landmark)):
        starts[landmark[vote] + 1] += 1
    for index in range(1, len(starts)):
        starts[index] += starts[index - 1]


@numba_jit
@no_type_check
def group_votes(landmark, columns, one, starts, grouped, units):
    """Group votes by landmark, each group in their order: a counting sort.

    Args:
        landmark: Landmark of each vote.
        columns: Of ``Votes``.
        one: Fixed-point units of a weight of 1.
        starts: Where each landmark's votes begin.
        grouped: Source and position, (6 votes); written.
        units: Weights, in whole fixed-point units; written.
    """
    next_index = starts.copy()
    for vote in range(len(landmark)):
        index = next_index[landmark[vote]]
        next_index[landmark[vote]] = index + 1
        for column in range(6):
            grouped[column, index] = columns[column, vote]
        # Exact in float32: a product with a power of two, then a whole number below 2^24.
        units[index] = np.rint(columns[7, vote] * one)


@numba_jit
@no_type_check
def _find_cells(landmark, position, edge, shape, first, numbers):
    """Find the cell of each vote; -1 for none. In float64 all of it is vectorised."""
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
        position: Position of each vote, (3 votes), in grid voxels.
        weight: Weight of each vote, in fixed-point units.
        edge: Edge of a cell along each axis, in grid voxels.
        shape: Cells along each axis; votes in the outermost ones, or past them, are left out.
        first: Grid index of the first voxel of the first cell.
        table: A zero for every cell of every landmark; written: 1, 2, … for those hit.

    Returns:
        Indices of the cells that are hit, in the order of their first vote, and their sums.
    """
    in_cell = np.empty(len(weight), dtype=np.int64)
    for landmark in range(len(starts) - 1):
        votes = slice(starts[landmark], starts[landmark + 1])
        positions = (position[0, votes], position[1, votes], position[2, votes])
        _find_cells(landmark, positions, edge, shape, first, in_cell[votes])
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
def smooth_cells(numbers, totals, table, shape):
    """Sum the votes in cells and around them, so that a peak at the corner of eight cells is one.

    The weights are a triangle along each axis, 1 2 1.

    Args:
        numbers: Indices of the cells.
        totals: Votes of every cell that is hit, in the order of the table.
        table: 1, 2, … for the cells of every landmark that are hit, else 0.
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
        landmark: Landmark of each cell.
        centre: Centre of each cell, (3 cells), in mm; of equally high cells the first is chosen.
        height: Height of each cell; changed.
        reach: How far a peak suppresses other cells, in mm.
        peaks: Centres, (3 landmarks modes), NaN; written.
    """
    highest = np.empty(peaks.shape[1], dtype=np.int64)
    for mode in range(peaks.shape[2]):
        highest[:] = -1
        for cell in range(len(height)):
            best = highest[landmark[cell]]
            if height[cell] > (height[best] if best >= 0 else 0.0):
                highest[landmark[cell]] = cell
        for index in range(len(highest)):
            if highest[index] >= 0:
                peaks[:, index, mode] = centre[:, highest[index]]
        for cell in range(len(height)):
            top = highest[landmark[cell]]
            if top >= 0:
                x = centre[0, cell] - centre[0, top]
                y = centre[1, cell] - centre[1, top]
                z = centre[2, cell] - centre[2, top]
                if x * x + y * y + z * z <= reach * reach:
                    height[cell] = 0.0
