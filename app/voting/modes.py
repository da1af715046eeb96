"""Votes -> Modes: the few places that each landmark's votes agree on.

Peaks say roughly where; mean shift on the raw votes says exactly where: a mode moves to the
weighted mean of the votes within reach, until it stands still. Then everything known about the mode
is summed over the votes within reach of where it came to rest. Every term of a sum is a whole
number of fixed-point units, over all landmarks and modes at once, so the order of the votes changes
no bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64

from app.compute import has_triton, run_parts, split_range
from app.voting.ballots import Ballots, collect_ballots
from app.voting.cpu.modes import (
    FIRST_LOOK,
    FIRST_REST,
    MEETING,
    SETTLED,
    SHIFTS,
    TERMS,
    count_voters,
    merge,
    rank,
    sum_near,
    sum_up,
    sums_between,
)
from app.voting.heatmaps import FIXED_ONE
from app.voting.indices import true_indices
from app.voting.peaks import Cells, find_peaks, lay_cells
from app.voting.readout import Readout
from app.voting.votes import Votes, select_votes

VOTES_PER_THREAD: Final = 1 << 15
"""Fewer votes are not worth a thread of their own: they take a tenth of a millisecond."""

_SECOND: Final = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
"""Which products of coordinates make a symmetric 3 x 3 matrix."""


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of every landmark, on the host, heaviest first; places without a mode are NaN.

    Attributes:
        position: Mean of the votes within reach, in grid voxels.
        weight: Their summed weight; 0 where there is no mode.
        mass: Weight per field voxel that could have voted for this place (see ``voters_around``).
        coherence: Share of the landmark's whole vote weight.
        covariance_mm2: Mean outer product of the votes' distances from the position, along grid
            axes: spread, not an error bar.
        source: Mean of the voxels that cast the votes, in grid voxels.
    """

    position: Float64[np.ndarray, "landmarks modes 3"]
    weight: Float64[np.ndarray, "landmarks modes"]
    mass: Float64[np.ndarray, "landmarks modes"]
    coherence: Float64[np.ndarray, "landmarks modes"]
    covariance_mm2: Float64[np.ndarray, "landmarks modes 3 3"]
    source: Float64[np.ndarray, "landmarks modes 3"]


def find_modes(votes: Votes, readout: Readout, count: int, cells: Cells | None = None) -> Modes:
    """Find the heaviest modes of every landmark.

    Args:
        votes: Votes for the landmarks of ``readout``, in any order.
        readout: The grid and its voting radius.
        count: Most modes per landmark.
        cells: What peaks are looked for in; None: as the read-out asks.

    Returns:
        The modes, heaviest first; ones that came to rest within reach of a heavier one are dropped.
    """
    if has_triton(votes.landmark.device):
        from app.voting.cuda.modes import ModeFinder  # noqa: PLC0415 - not there for every platform

        found = ModeFinder(votes, readout, count, cells or lay_cells(readout)).find()
        centres, sums, total = (part.numpy() for part in found)
        return _describe(sums, centres, total, readout)
    ballots = collect_ballots(votes, readout.landmarks)
    peaks = find_peaks(ballots, readout, count, cells)
    unit = np.array(readout.spacing_mm) / readout.reach_mm
    centres = np.moveaxis(peaks.centre_mm, 0, 2) / readout.reach_mm
    centres, sums = _climb(ballots, centres, unit, peaks.error_mm / readout.reach_mm)
    total = sums_between(ballots.weight, ballots.starts)
    return _describe(sums / FIXED_ONE, centres, total / FIXED_ONE, readout)


def _climb(
    ballots: Ballots,
    centres: Float64[np.ndarray, "landmarks modes 3"],
    unit: Float64[np.ndarray, " 3"],
    error: float,
) -> tuple[Float64[np.ndarray, "landmarks modes 3"], Float64[np.ndarray, "landmarks modes terms"]]:
    """Move every mode to the mean of the votes within reach of it until all stand still.

    Returns:
        Where they stand, and what is summed there.
    """
    columns = (ballots.starts, ballots.position, ballots.weight)
    all_columns = (*columns[:2], ballots.source, ballots.weight)
    votes = len(ballots.weight)
    for step in range(SHIFTS):
        if step < FIRST_REST:
            # Around a peak's cell first: not yet at what else is within reach of its corner.
            reach = error + FIRST_LOOK if step == 0 else 1.0
            sums = _in_parts(partial(sum_near, *columns, centres, unit, reach), votes)
        else:
            sums = _in_parts(partial(sum_up, *all_columns, centres, unit), votes)
        with np.errstate(invalid="ignore"):  # A mode without votes becomes NaN.
            moves = sums[..., -3:] / sums[..., :1]
        if step >= FIRST_REST and not (np.abs(moves) > SETTLED).any():
            return centres, sums[..., :TERMS]
        centres = centres + moves
        if step == 0:
            merge(centres, MEETING)
    sums = _in_parts(partial(sum_up, *all_columns, centres, unit), votes)
    return centres, sums[..., :TERMS]


def _in_parts(
    add_up: Callable[[int, int], Float64[np.ndarray, "*sums"]], votes: int
) -> Float64[np.ndarray, "*sums"]:
    """Sum over parts of the votes side by side; the sums are exact, so parts change no bit."""
    bounds = split_range(votes, VOTES_PER_THREAD)
    parts = run_parts(lambda part: add_up(bounds[part], bounds[part + 1]), len(bounds) - 1)
    return np.asarray(sum(parts[1:], parts[0]))


def _describe(
    sums: Float64[np.ndarray, "landmarks modes 10"],
    centres: Float64[np.ndarray, "landmarks modes 3"],
    total: Float64[np.ndarray, " landmarks"],
    readout: Readout,
) -> Modes:
    """Say what is known of each mode, and rank the modes."""
    spacing = np.array(readout.spacing_mm)
    places = centres * readout.reach_mm
    order = rank(centres, sums[..., 0], 1.0)
    sums = np.take_along_axis(sums, order[..., None], axis=1)
    sums[order < 0] = 0.0
    weight = sums[..., 0]
    places = np.take_along_axis(places, order[..., None], axis=1)
    position = np.where(weight[..., None] > 0, places, np.nan) / spacing
    means = sums[..., 1:] / np.where(weight > 0, weight, np.nan)[..., None]
    covariance = np.empty((*weight.shape, 3, 3))
    for column, (a, b) in enumerate(_SECOND, start=3):
        covariance[..., a, b] = covariance[..., b, a] = means[..., column] * readout.reach_mm**2
    whole = np.maximum(total, 1 / FIXED_ONE)
    return Modes(
        position=position,
        weight=weight,
        mass=weight / voters_around(position, readout),
        coherence=weight / whole[:, None],
        covariance_mm2=covariance,
        source=position + means[..., :3] * readout.reach_mm / spacing,
    )


def votes_of_scan(votes: Votes, readout: Readout) -> Votes:
    """Drop the votes of voxels that only pad a tile or a grid: there is no scan where they are.

    Args:
        votes: Votes for the landmarks of ``readout``, in any order.
        readout: The grid, and which part of it there is a scan in.

    Returns:
        The votes of the scan's own voxels, in the same order.
    """
    if readout.cover is not None:
        held = readout.cover.holds(votes.source.cpu().numpy().astype(np.float64))
        votes = select_votes(votes, torch.from_numpy(held).to(votes.source.device))
    if len(votes) == 0:
        return votes
    columns = votes.source.T
    # On most grids no voxel pads, and the maxima tell that soonest; NumPy's are the faster ones.
    last = columns.numpy().max(axis=1) if columns.device.type == "cpu" else columns.amax(1).tolist()
    if all(at <= size - 0.5 for at, size in zip(last, readout.shape, strict=True)):
        return votes
    end = columns.new_tensor(readout.shape)[:, None] - 0.5
    return select_votes(votes, true_indices((columns <= end).all(0)))


def voters_around(
    points: Float64[np.ndarray, "*n 3"], readout: Readout
) -> Float64[np.ndarray, "*n"]:
    """Count the field voxels that could have voted for a place.

    These are the field voxels with a centre within the voting radius of the place and inside the
    grid, and inside the scan where the grid reaches past it. Around a place outside at least an
    eighth of a whole ball is counted: no place inside a grid larger than the radius sees less, and
    a handful of voxels proves nothing.

    Args:
        points: Places in grid voxels; NaN counts 1.
        readout: The grid, its field's stride and the voting radius.

    Returns:
        Counts, at least 1.
    """
    pitch = np.array(readout.spacing_mm) * readout.stride
    size = -(-np.array(readout.shape) // readout.stride)
    # The last field voxel of an axis may have its centre past the grid's end.
    size -= (size - 0.5) * readout.stride - 0.5 > np.array(readout.shape) - 0.5
    flat = points.reshape(-1, 3)
    centres = (flat + 0.5) / readout.stride - 0.5
    if readout.cover is None:
        counts = count_voters(centres, size, pitch, readout.radius_mm)
    else:
        counts = _count_covered(centres, size, pitch, readout)
    outside = np.isfinite(flat).all(1) & ~readout.holds(flat)
    octant = math.pi / 6 * readout.radius_mm**3 / np.prod(pitch)
    least = np.where(outside, max(1.0, octant), 1.0)
    return np.asarray(np.maximum(counts, least).reshape(points.shape[:-1]))


def _count_covered(
    centres: Float64[np.ndarray, "n 3"],
    size: Int64[np.ndarray, " 3"],
    pitch: Float64[np.ndarray, " 3"],
    readout: Readout,
) -> Float64[np.ndarray, " n"]:
    """Count the field voxels around each place that lie in the scan, one by one."""
    cover = readout.cover
    counts = np.zeros(len(centres))
    most = np.ceil(readout.radius_mm / pitch + 0.5).astype(int)
    steps = np.stack(np.meshgrid(*[np.arange(-n, n + 1) for n in most], indexing="ij"), axis=-1)
    for index in np.flatnonzero(np.isfinite(centres).all(axis=1)):
        voxels = np.rint(centres[index]) + steps.reshape(-1, 3)
        near = (((voxels - centres[index]) * pitch) ** 2).sum(axis=1) <= readout.radius_mm**2
        near &= ((voxels >= 0) & (voxels < size)).all(axis=1)
        seen = (voxels[near] + 0.5) * readout.stride - 0.5
        counts[index] = len(seen) if cover is None else cover.holds(seen).sum()
    return counts
