"""Votes -> Peaks: roughly where each landmark's votes agree, and which votes are near those places.

Votes are counted in cells of about a third of the voting radius. Few cells are hit at all, so only
those are looked at, whatever the size of the grid and the number of landmarks: each by the votes in
it and the cells around it, one peak after the other, each hiding its surroundings from the next.
All sums are of whole numbers below 2^53 in float64 and so exact: the order of votes changes no bit.

This runs on the host: votes are few, and the hundred small steps that they need cost less there
than the calls alone would on a device.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from app.ballots import Ballots
from app.readout import Readout

CELL_REACH: Final = 0.6
"""Edge of a cell in reaches: small enough to tell places apart that the read-out can tell apart."""

TABLE_BYTES: Final = 256 << 20
"""Most memory that the table of all cells may take; only the pages of cells that are hit do. So a
cell's number fits 32 bits."""

GATHER: Final = 3.0
"""Votes within this many reaches of a peak may join its mode: it would have to wander two reaches
before it missed one."""

_NEIGHBOURS: Final = tuple(itertools.product((-1, 0, 1), repeat=3))


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells over the grid, a margin of the voting radius, and a rim of one cell that is never hit.

    Attributes:
        edge: Of a cell along each axis, in grid voxels.
        shape: How many cells there are along each axis.
        first: Grid index of the first voxel of the first cell; negative by margin and rim.
    """

    edge: tuple[int, int, int]
    shape: tuple[int, int, int]
    first: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest cells of every landmark, and the votes around them.

    Attributes:
        centre_mm: Centres of the cells along grid axes, highest first; NaN where there is none.
        row: Which vote, of every vote near a peak.
        segment: Which peak it is near to, as landmark * modes + mode.
        error_mm: How far a peak may be from its cell's centre: half the cell's diagonal.
    """

    centre_mm: Float64[np.ndarray, "3 landmarks modes"]
    row: Int64[np.ndarray, " pairs"]
    segment: Int64[np.ndarray, " pairs"]
    error_mm: float


@dataclass(frozen=True, slots=True)
class _Hit:
    """The cells that votes fall into, by landmark, then by place.

    Attributes:
        landmark: Whose cell it is.
        centre_mm: Its centre, along grid axes.
        height: Votes in it and around it, in units that only compare.
    """

    landmark: Int32[np.ndarray, " cells"]
    centre_mm: Float64[np.ndarray, "3 cells"]
    height: Float64[np.ndarray, " cells"]


def find_peaks(ballots: Ballots, readout: Readout, count: int, cells: Cells | None = None) -> Peaks:
    """Find peaks: the highest cell, then the highest out of its reach, and so on.

    Args:
        ballots: Votes for the landmarks of ``readout``.
        readout: The grid and its voting radius.
        count: Most peaks per landmark.
        cells: What to count in; None: as ``lay_cells``.

    Returns:
        The peaks; ties go to the lowest index. Votes outside of all cells are left out.
    """
    cells = cells or lay_cells(readout)
    number, rows = _cell_of(ballots, cells)
    weight = ballots.weight if rows is None else ballots.weight[rows]
    hit, slot = _hit_cells(number, weight, cells, readout)
    centres = _highest(hit, readout, count)
    near = _near(hit, centres, readout, cells)
    pairs = [(mode, np.flatnonzero(near[mode][slot])) for mode in range(count) if near[mode].any()]
    if not pairs:
        pairs = [(0, np.zeros(0, dtype=np.int64))]
    row = np.concatenate([found for _, found in pairs])
    row = row if rows is None else rows[row]
    mode = np.concatenate([np.full(len(found), mode) for mode, found in pairs])
    return Peaks(
        centre_mm=centres,
        row=row,
        segment=ballots.landmark[row] * count + mode,
        error_mm=_half_diagonal_mm(cells, readout),
    )


def lay_cells(readout: Readout) -> Cells:
    """Lay cells for a read-out: coarser only where the table of all landmarks would not fit.

    Args:
        readout: The grid, its voting radius, and the number of landmarks.

    Returns:
        Cells with edges of ``CELL_REACH`` reaches in mm, to the nearest voxel.
    """
    coarser = 1
    while True:
        i, j, k = (
            coarser * max(1, round(CELL_REACH * readout.reach_mm / mm)) for mm in readout.spacing_mm
        )
        cells = cells_of_edge((i, j, k), readout)
        if readout.landmarks * math.prod(cells.shape) * 4 <= TABLE_BYTES:
            return cells
        coarser *= 2


def cells_of_edge(edge: tuple[int, int, int], readout: Readout) -> Cells:
    """Lay cells of a given edge in voxels."""
    shape, first = [], []
    for size, step, mm in zip(readout.shape, edge, readout.spacing_mm, strict=True):
        rim = math.ceil(readout.radius_mm / (mm * step)) + 1
        shape.append(-(-size // step) + 2 * rim)
        first.append(-step * rim)
    return Cells(edge, (shape[0], shape[1], shape[2]), (first[0], first[1], first[2]))


def square(vectors: Float64[np.ndarray, "3 ..."]) -> Float64[np.ndarray, "..."]:
    """Square lengths, in an order of additions that no vector width changes."""
    x, y, z = vectors
    return np.asarray(x * x + y * y + z * z)


def _half_diagonal_mm(cells: Cells, readout: Readout) -> float:
    return math.hypot(*(n * mm / 2 for n, mm in zip(cells.edge, readout.spacing_mm, strict=True)))


def _cell_of(
    ballots: Ballots, cells: Cells
) -> tuple[Int32[np.ndarray, " n"], Int64[np.ndarray, " n"] | None]:
    """Number the cell of each vote that falls into one, and say which votes do; None: all."""
    indices = []
    for place, edge, first in zip(ballots.position, cells.edge, cells.first, strict=True):
        index = place * np.float32(1 / edge)
        index += np.float32((0.5 - first) / edge)
        indices.append(index)
    rows = None
    if any(
        index.size and not (index.min() >= 1 and index.max() < size - 1)
        for index, size in zip(indices, cells.shape, strict=True)
    ):
        inside = [
            (index >= 1) & (index < size - 1)
            for index, size in zip(indices, cells.shape, strict=True)
        ]
        rows = np.flatnonzero(inside[0] & inside[1] & inside[2])
        indices = [index[rows] for index in indices]
    number = (ballots.landmark if rows is None else ballots.landmark[rows]).astype(np.int32)
    for index, size in zip(indices, cells.shape, strict=True):
        number *= np.int32(size)
        number += index.astype(np.int32)
    return number, rows


def _hit_cells(
    number: Int32[np.ndarray, " n"],
    weight: Float64[np.ndarray, " n"],
    cells: Cells,
    readout: Readout,
) -> tuple[_Hit, Int32[np.ndarray, " n"]]:
    """Count the votes; give the cells that are hit, and which of these each vote falls into."""
    a, b, c = cells.shape
    # Zeros take no memory until they are touched, so the table's size is no cost.
    table = np.zeros(readout.landmarks * a * b * c, dtype=np.int32)
    hit = _distinct(number, table)
    table[hit] = np.arange(1, len(hit) + 1, dtype=np.int32)
    slot = table[number]
    slot -= 1
    steps = np.array([(x * b + y) * c + z for x, y, z in _NEIGHBOURS])
    total = np.append(0.0, np.bincount(slot, weight, len(hit)))
    around = total[table[steps[:, None] + hit]]
    # A triangle along each axis, 1 2 1, joins a peak that eight cells share at a corner.
    triangle = np.array([math.prod(2 - abs(step) for step in steps) for steps in _NEIGHBOURS])
    line, k = np.divmod(hit, c)
    plane, j = np.divmod(line, b)
    landmark, i = np.divmod(plane, a)
    centre_mm = [
        (index * edge + (first + (edge - 1) / 2)) * mm
        for index, edge, first, mm in zip(
            (i, j, k), cells.edge, cells.first, readout.spacing_mm, strict=True
        )
    ]
    return _Hit(landmark, np.stack(centre_mm), triangle.astype(np.float64) @ around), slot


def _distinct(
    number: Int32[np.ndarray, " n"], table: Int32[np.ndarray, " numbers"]
) -> Int32[np.ndarray, " distinct"]:
    """List the distinct numbers, ascending.

    Everyone signs the place of his number in the table; whose signature is left there speaks for
    all of them. Only the speakers are sorted: sorting everyone takes several times longer.
    """
    everyone = np.arange(len(number), dtype=np.int32)
    table[number] = everyone
    return np.sort(number[table[number] == everyone])


def _highest(hit: _Hit, readout: Readout, count: int) -> Float64[np.ndarray, "3 landmarks modes"]:
    """Find each landmark's highest cells, each out of reach of those before it; centres in mm."""
    peaks = np.full((3, readout.landmarks, count), np.nan)
    height = hit.height.copy()
    changes = np.flatnonzero(np.diff(hit.landmark, prepend=-1))
    if len(changes) == 0:
        return peaks
    everyone = np.arange(len(height))
    for mode in range(count):
        top = np.zeros(readout.landmarks)
        top[hit.landmark[changes]] = np.maximum.reduceat(height, changes)
        is_top = (height == top[hit.landmark]) & (height > 0)
        first = np.minimum.reduceat(np.where(is_top, everyone, len(height)), changes)
        first = first[first < len(height)]
        peaks[:, hit.landmark[first], mode] = hit.centre_mm[:, first]
        away = hit.centre_mm - peaks[:, hit.landmark, mode]
        height[square(away) <= readout.reach_mm**2] = 0.0  # NaN, where there is no peak, is not.
    return peaks


def _near(
    hit: _Hit, peaks: Float64[np.ndarray, "3 landmarks modes"], readout: Readout, cells: Cells
) -> Bool[np.ndarray, "modes cells"]:
    """Say which cells may hold votes of which of their landmark's peaks."""
    limit = GATHER * readout.reach_mm + _half_diagonal_mm(cells, readout)
    away = hit.centre_mm[:, None] - peaks[:, hit.landmark].swapaxes(1, 2)
    return np.asarray(square(away) <= limit**2)  # NaN, where there is no peak, is not.
