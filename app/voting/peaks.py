"""Votes -> peaks: roughly where the votes of each landmark agree.

Votes are counted in cells of about a third of the voting radius. Few cells are hit at all, and only
those are processed, whatever the size of the grid and the number of landmarks. A cell is weighted
with the cells around it; peaks are found one after the other, each suppressing its surroundings.
Sums are of whole numbers below 2^53 in float64 and so exact: the order of votes changes no bit.
"""

import secrets
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float32, Float64, Int64

from app.voting.cpu import peaks as cpu_peaks
from app.voting.readout import Readout
from app.voting.reference import FIXED_ONE
from app.voting.votes import Votes

CELL_REACH: Final = 0.6
"""Edge of a cell in reaches, to the nearest voxel: small enough to separate peaks that the read-out
can separate."""

HASH_FACTOR: Final = secrets.randbits(63) | 1
"""By which cells are hashed: nobody can choose votes whose cells all have the same place. It
changes no result."""


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


def group_votes(votes: Votes, landmarks: int) -> GroupedVotes:
    """Group votes by landmark, each group in the order of the votes.

    Raises:
        BadParameter: There are votes for others.
    """
    # Compiled loops write wherever a landmark's number points to.
    votes.check(landmarks)
    given = (votes.landmark.numpy(), votes.columns.numpy(), landmarks, np.float32(FIXED_ONE))
    starts, columns, weight = cpu_peaks.group_votes(*given)
    return GroupedVotes(starts, columns[3:], columns[:3], weight)


def find_peaks(
    votes: GroupedVotes, readout: Readout, count: int
) -> tuple[Float64[np.ndarray, "3 landmarks modes"], float]:
    """Find peaks: the highest cell, then the highest out of its reach, and so on.

    Args:
        votes: Votes for the landmarks of ``readout``.
        readout: The grid and its voting radius.
        count: Most peaks per landmark.

    Returns:
        Centres of the highest cells of every landmark in mm along grid axes, highest first, of
        equal ones the one of the lowest index; NaN where there is none. And how far a peak may be
        from its cell's centre, in mm: half the cell's diagonal. Votes outside all cells are left
        out.
    """
    spacing = readout.metric_mm
    edge = np.maximum(1.0, np.round(CELL_REACH * readout.reach_mm / spacing))
    # Past each end of the grid, a margin of the voting radius, and a border of cells never hit.
    margin = np.ceil(readout.radius_mm / (spacing * edge)) + 1
    i, j, k = (int(cells) for cells in np.ceil(readout.shape / edge) + 2 * margin)
    first = -edge * margin
    mm = np.stack([edge * spacing, (first + (edge - 1) / 2) * spacing])
    peaks = np.full((3, readout.landmarks, count), np.nan)
    given = (votes.starts, votes.position, votes.weight, edge, (i, j, k), first, mm)
    cpu_peaks.find_peaks(*given, readout.reach_mm, HASH_FACTOR, peaks)
    return peaks, float(np.linalg.norm(edge * spacing)) / 2
