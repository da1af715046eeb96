"""Votes -> Peaks: roughly where the votes of each landmark agree.

Votes are counted in cells of about a third of the voting radius. Few cells are hit at all, and only
those are processed, whatever the size of the grid and the number of landmarks. A cell is weighted
with the cells around it; peaks are found one after the other, each suppressing its surroundings.
Sums are of whole numbers below 2^53 in float64 and so exact: the order of votes changes no bit.

This runs on the CPU: votes are few, and the many small steps would cost more in launches on a
device than they cost here.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float32, Float64, Int64

from app.voting.cpu import peaks as cpu_peaks
from app.voting.readout import Readout
from app.voting.votes import FIXED_ONE, Votes

CELL_REACH: Final = 0.6
"""Edge of a cell in reaches: small enough to separate peaks that the read-out can separate."""

TABLE_BYTES: Final = 256 << 20
"""Most memory for the table of all cells, of which only the pages of cells that are hit are
used."""


@dataclass(frozen=True, slots=True)
class GroupedVotes:
    """Votes on the host, column by column, grouped by landmark.

    Attributes:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Where a vote says the landmark is, in grid voxels.
        source: Centre of the voxel that votes, in grid voxels.
        weight: Its weight in whole fixed-point units.
    """

    starts: Int64[np.ndarray, " bounds"]
    position: Float32[np.ndarray, "3 votes"]
    source: Float32[np.ndarray, "3 votes"]
    weight: Float64[np.ndarray, " votes"]


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells over the grid, a margin of the voting radius, and a border of cells never hit.

    Attributes:
        edge: Edge of a cell along each axis, in grid voxels.
        shape: How many cells there are along each axis.
        first: Grid index of the first voxel of the first cell; negative by margin and border.
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


def group_votes(votes: Votes, landmarks: int) -> GroupedVotes:
    """Copy votes to the host and group them by landmark, each group in the order of the votes."""
    landmark = votes.landmark.cpu().numpy()
    position, source = votes.position.T.cpu().numpy(), votes.source.T.cpu().numpy()
    starts = np.zeros(landmarks + 1, dtype=np.int64)
    cpu_peaks.count_votes(landmark, starts)
    columns = np.empty((6, len(landmark)), dtype=np.float32)
    weight = np.empty(len(landmark), dtype=np.float64)
    cpu_peaks.group_votes(
        landmark,
        position,
        source,
        votes.weight.cpu().numpy(),
        np.float32(FIXED_ONE),
        starts,
        columns,
        weight,
    )
    return GroupedVotes(starts, columns[:3], columns[3:], weight)


def find_peaks(
    votes: GroupedVotes, readout: Readout, count: int, cells: Cells | None = None
) -> Peaks:
    """Find peaks: the highest cell, then the highest out of its reach, and so on.

    Args:
        votes: Votes for the landmarks of ``readout``.
        readout: The grid and its voting radius.
        count: Most peaks per landmark.
        cells: The cells to count in; None: those of ``choose_cells``.

    Returns:
        The peaks; of equal ones the one of the lowest index. Votes outside all cells are left out.
    """
    cells = cells or choose_cells(readout)
    # Zeros take no memory until they are touched, so the table's size is no cost.
    table = np.zeros(readout.landmarks * math.prod(cells.shape), dtype=np.int32)
    edge, first = np.array(cells.edge, np.float64), np.array(cells.first, np.float64)
    hit, total = cpu_peaks.count_cells(
        votes.starts, votes.position, votes.weight, edge, cells.shape, first, table
    )
    number = np.sort(hit)
    spacing = np.array(readout.spacing_mm)
    landmark, *index = np.unravel_index(number, (readout.landmarks, *cells.shape))
    centre = first + (edge - 1) / 2
    centre_mm = (np.stack(index) * edge[:, None] + centre[:, None]) * spacing[:, None]
    height = cpu_peaks.smooth_cells(number, total, table, cells.shape)
    peaks = np.full((3, readout.landmarks, count), np.nan)
    cpu_peaks.choose_peaks(landmark, centre_mm, height, readout.reach_mm, peaks)
    return Peaks(centre_mm=peaks, error_mm=float(np.linalg.norm(edge * spacing)) / 2)


def choose_cells(readout: Readout) -> Cells:
    """Choose the cells of a read-out: coarser only where the table of all would not fit.

    Args:
        readout: The grid, its voting radius, and the number of landmarks.

    Returns:
        Cells with edges of ``CELL_REACH`` reaches in mm, to the nearest voxel.
    """
    coarsening = 1
    while True:
        i, j, k = (
            coarsening * max(1, round(CELL_REACH * readout.reach_mm / mm))
            for mm in readout.spacing_mm
        )
        cells = make_cells((i, j, k), readout)
        if readout.landmarks * math.prod(cells.shape) * 4 <= TABLE_BYTES:
            return cells
        coarsening *= 2


def make_cells(edge: tuple[int, int, int], readout: Readout) -> Cells:
    """Make cells of a given edge in voxels."""
    shape, first = [], []
    for size, step, mm in zip(readout.shape, edge, readout.spacing_mm, strict=True):
        margin = math.ceil(readout.radius_mm / (mm * step)) + 1
        shape.append(-(-size // step) + 2 * margin)
        first.append(-step * margin)
    return Cells(edge, (shape[0], shape[1], shape[2]), (first[0], first[1], first[2]))
