"""Ballots -> Peaks: roughly where each landmark's votes agree.

Votes are counted in cells of about a third of the voting radius. Few cells are hit at all, so only
those are looked at, whatever the size of the grid and the number of landmarks: each by the votes in
it and the cells around it, one peak after the other, each hiding its surroundings from the next.
All sums are of whole numbers below 2^53 in float64 and so exact: the order of votes changes no bit.

This runs on the host: votes are few, and the small steps that they need cost less there than the
calls alone would on a device.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from app.ballots import Ballots
from app.readout import Readout
from app.tally import count_cells

CELL_REACH: Final = 0.6
"""Edge of a cell in reaches: small enough to tell places apart that the read-out can tell apart."""

TABLE_BYTES: Final = 256 << 20
"""Most memory that the table of all cells may take; only the pages of cells that are hit do."""

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
    """The highest cells of every landmark.

    Attributes:
        centre_mm: Their centres along grid axes, highest first; NaN where there is none.
        error_mm: How far a peak may be from its cell's centre: half the cell's diagonal.
    """

    centre_mm: Float64[np.ndarray, "3 landmarks modes"]
    error_mm: float


@dataclass(frozen=True, slots=True)
class _Hit:
    """The cells that votes fall into, by landmark, then by place.

    Attributes:
        landmark: Whose cell it is.
        centre_mm: Its centre, along grid axes.
        height: Votes in it and around it, in units that only compare.
    """

    landmark: Int64[np.ndarray, " cells"]
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
    diagonal = [edge * mm for edge, mm in zip(cells.edge, readout.spacing_mm, strict=True)]
    return Peaks(
        centre_mm=_highest(_hit_cells(ballots, cells, readout), readout, count),
        error_mm=math.hypot(*diagonal) / 2,
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


def _hit_cells(ballots: Ballots, cells: Cells, readout: Readout) -> _Hit:
    """Count the votes in the cells that are hit."""
    a, b, c = cells.shape
    # Zeros take no memory until they are touched, so the table's size is no cost.
    table = np.zeros(readout.landmarks * a * b * c, dtype=np.int32)
    number, total = count_cells(
        ballots.landmark,
        ballots.position,
        ballots.weight,
        np.array(cells.edge, dtype=np.float64),
        np.array(cells.shape),
        np.array(cells.first, dtype=np.float64),
        table,
    )
    order = np.argsort(number)  # The table still goes by the first votes.
    steps = np.array([(x * b + y) * c + z for x, y, z in _NEIGHBOURS])
    around = np.append(0.0, total)[table[steps[:, None] + number[order]]]
    # A triangle along each axis, 1 2 1, joins a peak that eight cells share at a corner.
    triangle = np.array([math.prod(2 - abs(step) for step in steps) for steps in _NEIGHBOURS])
    line, k = np.divmod(number[order], c)
    plane, j = np.divmod(line, b)
    landmark, i = np.divmod(plane, a)
    centre_mm = [
        (index * edge + (first + (edge - 1) / 2)) * mm
        for index, edge, first, mm in zip(
            (i, j, k), cells.edge, cells.first, readout.spacing_mm, strict=True
        )
    ]
    return _Hit(landmark, np.stack(centre_mm), triangle.astype(np.float64) @ around)


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
