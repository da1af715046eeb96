"""Votes -> groups by landmark -> cells -> peaks, compiled: the loops of ``app.voting.peaks``.

Every term is a whole number of fixed-point units and every sum stays below 2^53, so float64 holds
each sum exactly and the order of the votes changes no bit.
"""

import numpy as np

from app.compute import numba_jit


@numba_jit
def group_votes(landmark, columns, landmarks, one):
    """Group votes by landmark, each group in their order: a counting sort.

    Args:
        landmark: Landmark of each vote.
        columns: Of ``Votes``.
        landmarks: How many there are.
        one: Fixed-point units of a weight of 1, in float32.

    Returns:
        Where each landmark's votes begin, and the last one's end; source and position, (6 votes);
        weights, in whole fixed-point units.
    """
    starts = np.zeros(landmarks + 1, np.int64)
    for vote in range(len(landmark)):
        starts[landmark[vote] + 1] += 1
    for index in range(landmarks):
        starts[index + 1] += starts[index]
    grouped, units = np.empty((6, len(landmark)), np.float32), np.empty(len(landmark))
    next_index = starts.copy()
    for vote in range(len(landmark)):
        index = next_index[landmark[vote]]
        next_index[landmark[vote]] = index + 1
        for column in range(6):
            grouped[column, index] = columns[column, vote]
        # Exact in float32: a product with a power of two, then a whole number below 2^24.
        units[index] = np.rint(columns[7, vote] * one)
    return starts, grouped, units


@numba_jit
def find_peaks(starts, position, weight, edge, shape, first, mm, reach, factor, peaks):
    """Find the peaks of one landmark after the other.

    Args:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Position of each vote, (3 votes), in grid voxels.
        weight: Weight of each vote, in fixed-point units.
        edge: Edge of a cell along each axis, in grid voxels.
        shape: Cells along each axis; votes in the outermost ones, or past them, are left out.
        first: Grid index of the first voxel of the first cell.
        mm: Edge of a cell along each axis, and the centre of the first, in mm, (2 3).
        reach: How far a peak suppresses other cells, in mm.
        factor: Odd, by which cells are hashed.
        peaks: Centres, (3 landmarks modes), NaN; written.
    """
    for landmark in range(len(starts) - 1):
        votes = slice(starts[landmark], starts[landmark + 1])
        positions = (position[0, votes], position[1, votes], position[2, votes])
        table = _make_table(len(weight[votes]), factor)
        cells, totals = _count_cells(positions, weight[votes], edge, shape, first, table)
        heights = _smooth_cells(cells, totals, table, shape)
        _choose_peaks(cells, heights, shape, mm, reach, peaks[:, landmark])


@numba_jit
def _make_table(most, factor):
    """Make a hash table of up to so many cells, whatever the size of the grid.

    Returns:
        Zeros, at least twice as many as cells; the factor; and how far products are shifted.
    """
    bits = 1
    while 1 << bits < 2 * most:
        bits += 1
    return np.zeros(1 << bits, dtype=np.int32), factor, 64 - bits


@numba_jit
def _find_slot(cell, cells, table):
    """Return where in the table a cell is, as 1 + its index in ``cells``, or 0 if it is not."""
    numbers, factor, shift = table
    last = len(numbers) - 1
    slot = ((cell * factor) >> shift) & last
    while numbers[slot] and cells[numbers[slot] - 1] != cell:
        slot = (slot + 1) & last
    return slot


@numba_jit
def _find_cells(positions, edge, shape, first, cells):
    """Find the cell of each vote; -1 for none. In float64 all of it is vectorised."""
    end = (shape[0] - 1.0, shape[1] - 1.0, shape[2] - 1.0)
    for vote in range(len(cells)):
        i = np.floor((positions[0][vote] - first[0] + 0.5) / edge[0])
        j = np.floor((positions[1][vote] - first[1] + 0.5) / edge[1])
        k = np.floor((positions[2][vote] - first[2] + 0.5) / edge[2])
        inside = (i >= 1.0) & (i < end[0]) & (j >= 1.0) & (j < end[1]) & (k >= 1.0) & (k < end[2])
        cell = (i * (end[1] + 1.0) + j) * (end[2] + 1.0) + k
        cells[vote] = np.int64(cell if inside else -1.0)


@numba_jit
def _count_cells(positions, weight, edge, shape, first, table):
    """Add up the votes in each cell that is hit.

    Returns:
        Indices of the cells that are hit, in the order of their first vote, and their sums; these
        cells are in ``table``.
    """
    in_cell = np.empty(len(weight), dtype=np.int64)
    _find_cells(positions, edge, shape, first, in_cell)
    cells = np.empty(len(weight), dtype=np.int64)
    totals = np.empty(len(weight), dtype=np.float64)
    count = 0
    for vote in range(len(weight)):
        cell = in_cell[vote]
        # One without weight says nothing, and would make a peak of what surrounds it.
        if cell < 0 or weight[vote] == 0.0:
            continue
        slot = _find_slot(cell, cells, table)
        if table[0][slot] == 0:
            cells[count], totals[count] = cell, 0.0
            count += 1
            table[0][slot] = count
        totals[table[0][slot] - 1] += weight[vote]
    return cells[:count], totals[:count]


@numba_jit
def _smooth_cells(cells, totals, table, shape):
    """Sum the votes in cells and around them, so that a peak at the corner of eight cells is one.

    The weights are a triangle along each axis, 1 2 1.

    Returns:
        The height of each cell.
    """
    heights = np.zeros(len(cells), dtype=np.float64)
    for index in range(len(cells)):
        for di in range(-1, 2):
            for dj in range(-1, 2):
                for dk in range(-1, 2):
                    cell = cells[index] + (di * shape[1] + dj) * shape[2] + dk
                    other = table[0][_find_slot(cell, cells, table)]
                    if other:
                        share = (2 - abs(di)) * (2 - abs(dj)) * (2 - abs(dk))
                        heights[index] += share * totals[other - 1]
    return heights


@numba_jit
def _choose_peaks(cells, heights, shape, mm, reach, peaks):
    """Choose the highest cell, then the highest out of its reach, and so on.

    Args:
        cells: Indices of the cells; of equally high ones that of the lowest index is chosen.
        heights: Of each cell; changed.
        shape: As for ``find_peaks``, like ``mm`` and ``reach``.
        mm: Edge of a cell, and the centre of the first.
        reach: How far a peak suppresses other cells.
        peaks: Centres, (3 modes); written.
    """
    centres = np.empty((3, len(cells)), dtype=np.float64)
    for index in range(len(cells)):
        row = cells[index] // shape[2]
        centres[0, index] = row // shape[1] * mm[0, 0] + mm[1, 0]
        centres[1, index] = row % shape[1] * mm[0, 1] + mm[1, 1]
        centres[2, index] = cells[index] % shape[2] * mm[0, 2] + mm[1, 2]
    for mode in range(peaks.shape[1]):
        top = -1
        for index in range(len(cells)):
            height, best = heights[index], heights[top] if top >= 0 else 0.0
            if height > best or (top >= 0 and height == best and cells[index] < cells[top]):
                top = index
        if top < 0:
            return
        peaks[:, mode] = centres[:, top]
        for index in range(len(cells)):
            x = centres[0, index] - centres[0, top]
            y = centres[1, index] - centres[1, top]
            z = centres[2, index] - centres[2, top]
            if x * x + y * y + z * z <= reach * reach:
                heights[index] = 0.0
