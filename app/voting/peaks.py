"""Ballots -> Peaks: roughly where each landmark's votes agree.

Votes are counted in cells of about a third of the voting radius. Few cells are hit at all, so only
those are looked at, whatever the size of the grid and the number of landmarks: each by the votes in
it and the cells around it, one peak after the other, each hiding its surroundings from the next.
All sums are of whole numbers below 2^53 in float64 and so exact: the order of votes changes no bit.

This runs on the host: votes are few, and the small steps that they need cost less there than the
calls alone would on a device.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from app.voting.ballots import Ballots
from app.voting.cpu.peaks import choose_peaks, count_cells, weigh_cells
from app.voting.readout import Readout

CELL_REACH: Final = 0.6
"""Edge of a cell in reaches: small enough to tell places apart that the read-out can tell apart."""

TABLE_BYTES: Final = 256 << 20
"""Most memory that the table of all cells may take; only the pages of cells that are hit do."""


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
    # Zeros take no memory until they are touched, so the table's size is no cost.
    table = np.zeros(readout.landmarks * math.prod(cells.shape), dtype=np.int32)
    edge, first = np.array(cells.edge, np.float64), np.array(cells.first, np.float64)
    hit, total = count_cells(
        ballots.starts, ballots.position, ballots.weight, edge, cells.shape, first, table
    )
    number = np.sort(hit)
    spacing = np.array(readout.spacing_mm)
    landmark, *index = np.unravel_index(number, (readout.landmarks, *cells.shape))
    middle = first + (edge - 1) / 2
    centre_mm = (np.stack(index) * edge[:, None] + middle[:, None]) * spacing[:, None]
    height = weigh_cells(number, total, table, cells.shape)
    peaks = np.full((3, readout.landmarks, count), np.nan)
    choose_peaks(landmark, centre_mm, height, readout.reach_mm, peaks)
    return Peaks(centre_mm=peaks, error_mm=float(np.linalg.norm(edge * spacing)) / 2)


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
