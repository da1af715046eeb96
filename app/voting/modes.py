"""Votes -> Modes: the few positions that each landmark's votes agree on.

Peaks say roughly where they are; mean shift on the votes says exactly where: a mode moves to the
weighted mean of the votes within reach of it, until it stands still. Everything known about the
mode is then summed over the votes within reach. Every term of a sum is a whole number of
fixed-point units, for all landmarks and modes at once, so the order of the votes changes no bit.

The voxels of a heatmap do not point anywhere, and those that a border cuts off, or that just reach
the threshold, pull the mean. So a heatmap's mode is where a Gaussian has its peak that is fitted to
the votes within reach (Guo, 2011, https://doi.org/10.1109/MSP.2011.941846): in logarithms that is
linear least squares, exact for any Gaussian, whole or cut.

Where a network answers coordinates, all votes of a landmark are one mode.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from app.compute import run_split
from app.geometry import scaling, translation
from app.voting.cpu import gaussians as cpu_gaussians
from app.voting.cpu import modes as cpu_modes
from app.voting.peaks import GroupedVotes, find_peaks, group_votes
from app.voting.readout import Readout
from app.voting.reference import FIXED_ONE
from app.voting.votes import MAX_PROBABILITY, Votes

MAX_STEPS: Final = 5
"""Of mean shift, at most; clean modes stand still after two."""

FIRST_REACH: Final = 0.25
"""How far around a peak's cell the first step reaches, in reaches: enough for the top of a mode,
and not as far as the next one."""

FREE_STEPS: Final = 2
"""Steps before the first test whether modes stand still: clean modes do after as many."""

SETTLED: Final = 1e-6
"""Modes stand still if none moved by more than this, in reaches: steps would change nothing."""

MERGE_REACH: Final = 0.5
"""Modes nearer than this to a higher one after the first step, in reaches, are merged with it."""

PRIOR: Final = 1e-3
"""How much the width that a heatmap was trained with counts, as a share of the votes' weight: it
decides only where these are too few to tell."""

MAX_WIDENING: Final = 8.0
"""A heatmap this many times as wide as it was trained to be, in square, is no Gaussian to fit."""

EXACT_BITS: Final = 50
"""Of a sum of whole numbers that float64 holds exactly; with some left for votes that rounding puts
within reach of a mode, which were not where it was weighed."""

TINY: Final = 1e-5
"""Of the votes' weight: enough for equations to have a solution, and to change no other."""

VOTES_PER_THREAD: Final = 1 << 15
"""Fewer votes are not worth a thread of their own: they take a tenth of a millisecond."""


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of every landmark, on the host, heaviest first; NaN where there is none.

    Attributes:
        position: Mean of the votes within reach, in grid voxels; of a heatmap, where it peaks.
        weight: Their summed weight; 0 where there is no mode.
        mass: Weight per field voxel that could have voted for the position (``voters_around``).
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


def find_modes(votes: Votes, readout: Readout, count: int) -> Modes:
    """Find the heaviest modes of every landmark.

    Args:
        votes: Votes for the landmarks of ``readout``, in any order, on the host.
        readout: The grid and its voting radius.
        count: Most modes per landmark.

    Returns:
        The modes, heaviest first; ones that end within reach of a heavier one are dropped.
    """
    if readout.votes_each is not None:
        return _average(votes, readout, readout.votes_each)
    grouped = group_votes(votes, readout.landmarks)
    peaks_mm, error_mm = find_peaks(grouped, readout, count)
    reach_mm, spacing = readout.reach_mm, readout.metric_mm
    centres = np.ascontiguousarray(np.moveaxis(peaks_mm, 0, 2)) / reach_mm
    unit = spacing / reach_mm
    sums = _mean_shift(grouped, centres, unit, error_mm / reach_mm) / FIXED_ONE
    described = cpu_modes.describe_modes(centres, sums, spacing, reach_mm, reach_mm**2)
    position, source, covariance_mm2 = described
    stretch = readout.spacing_mm / spacing  # 1, unless heatmaps are round in voxels.
    covariance_mm2 *= np.outer(stretch, stretch)
    total, first = np.zeros((len(centres), 1)), grouped.starts[:-1]
    some = np.diff(grouped.starts) > 0  # Of no votes, reduceat would give the next landmark's.
    total[some, 0] = np.add.reduceat(grouped.weight, first[some]) / FIXED_ONE
    weight = sums[..., 0]
    modes = Modes(
        position=position,
        weight=weight,
        mass=weight / voters_around(position, readout),
        coherence=weight / np.maximum(total, 1 / FIXED_ONE),
        covariance_mm2=covariance_mm2,
        source=source,
    )
    return modes if readout.heatmap_threshold is None else _fit_gaussians(votes, modes, readout)


def _average(votes: Votes, readout: Readout, votes_each: int) -> Modes:
    """Make one mode of all votes of a landmark, as where a network answers coordinates.

    There is none where they scatter further than the radius: nothing is known of the position then.
    """
    votes.check(readout.landmarks)
    count = readout.landmarks
    modes = Modes(
        position=np.full((count, 1, 3), np.nan),
        weight=np.zeros((count, 1)),
        mass=np.zeros((count, 1)),
        coherence=np.zeros((count, 1)),
        covariance_mm2=np.full((count, 1, 3, 3), np.nan),
        source=np.full((count, 1, 3), np.nan),
    )
    voted_for, columns = votes.landmark.numpy(), votes.columns.numpy().astype(np.float64)
    for landmark in np.unique(voted_for[columns[7] > 0]):
        own = columns[:, voted_for == landmark]
        share = own[7] / own[7].sum()
        position = own[3:6] @ share
        away_mm = (own[3:6].T - position) * readout.spacing_mm
        covariance_mm2 = away_mm.T @ (share[:, None] * away_mm)
        if np.trace(covariance_mm2) > readout.radius_mm**2:
            continue
        mode = landmark, 0
        modes.position[mode], modes.source[mode] = position, own[:3] @ share
        modes.covariance_mm2[mode] = covariance_mm2
        modes.weight[mode], modes.coherence[mode] = own[7].sum(), 1.0
        modes.mass[mode] = modes.weight[mode] / votes_each
    return modes


def _mean_shift(
    votes: GroupedVotes,
    centres: Float64[np.ndarray, "landmarks modes 3"],
    unit: Float64[np.ndarray, " 3"],
    error: float,
) -> Float64[np.ndarray, "landmarks modes terms"]:
    """Move every mode, in place, to the mean of the votes within reach of it until all stand still.

    Returns:
        What is summed where they stand.
    """
    for step in range(MAX_STEPS):
        # Around a peak's cell first: not yet at what else is within reach of its corner.
        reach = error + FIRST_REACH if step == 0 else 1.0
        sums = _sum_votes(votes, centres, unit, reach)
        if step >= FREE_STEPS and cpu_modes.stand_still(sums, SETTLED):
            return sums
        cpu_modes.move_modes(centres, sums, MERGE_REACH if step == 0 else 0.0)
    return _sum_votes(votes, centres, unit, 1.0)


def _sum_votes(
    votes: GroupedVotes,
    centres: Float64[np.ndarray, "landmarks modes 3"],
    unit: Float64[np.ndarray, " 3"],
    reach: float,
) -> Float64[np.ndarray, "landmarks modes terms"]:
    """Sum over parts of the votes in parallel; sums are exact, so the split changes no bit."""
    columns = (votes.starts, votes.position, votes.source, votes.weight)
    given = (*columns, centres, unit, reach)
    sum_part = partial(cpu_modes.sum_votes, *given)
    parts = run_split(sum_part, len(votes.weight), VOTES_PER_THREAD)
    return np.asarray(sum(parts[1:], parts[0]))


def _fit_gaussians(votes: Votes, modes: Modes, readout: Readout) -> Modes:
    """Move the modes of heatmaps to where Gaussians peak that are fitted to the votes.

    The fit of ``log p = a + b x + c x^2``, with x in reaches from the mode, peaks at ``-b / 2c``.
    The width is fitted, too, but a little is known of it: p falls to the threshold in one radius.
    """
    unit = readout.metric_mm / readout.reach_mm
    least = math.log(readout.heatmap_threshold or 1.0)
    known = least * (readout.reach_mm / readout.radius_mm) ** 2
    # As fine as sums may be: beside what is known along the normal of a plane, rounding counts.
    most = MAX_PROBABILITY * np.maximum(modes.weight, 1 / FIXED_ONE) * max(1.0, -least)
    ones = np.exp2(EXACT_BITS - np.ceil(np.log2(most)))
    given = (votes.landmark.numpy(), votes.columns.numpy(), modes.position * unit, unit, ones)
    sums = cpu_gaussians.sum_logarithms(*given)
    products, right = sums[..., :-1], sums[..., -1:]
    weight = products[..., 0, 0].copy()
    products[..., 4, 4] += PRIOR * weight
    right[..., 4, 0] += PRIOR * weight * known
    # Few voxels in a plane or on a line say nothing of an axis: nothing moves along it then.
    products += TINY * np.maximum(weight, 1.0)[..., None, None] * np.eye(5)
    fit = np.linalg.solve(products, right)[..., 0]
    curvature = np.minimum(fit[..., 4:], known / MAX_WIDENING)
    moves = -fit[..., 1:4] / (2 * curvature)
    moves = np.where(np.linalg.norm(moves, axis=-1, keepdims=True) <= 1.0, moves, 0.0)
    position = modes.position + moves / unit
    return replace(modes, position=position, mass=modes.weight / voters_around(position, readout))


def drop_padding(votes: Votes, readout: Readout) -> Votes:
    """Drop the votes of voxels that only pad a tile or a grid and lie outside the scan.

    Votes of networks that answer coordinates come from no voxel, and are kept.

    Args:
        votes: Votes for the landmarks of ``readout``, in any order, on the host.
        readout: The grid, and the part of it that the scan covers.

    Returns:
        The votes of the scan's own voxels, in the same order.
    """
    if readout.votes_each is not None:
        return votes
    source, end = votes.columns[:3].numpy(), np.array(readout.shape, np.float32)[:, None] - 0.5
    inside = ((source >= -0.5) & (source <= end)).all(axis=0)
    if readout.scan is not None:
        inside &= readout.scan.contains(votes.source.numpy().astype(np.float64))
    return votes if inside.all() else votes.select(torch.from_numpy(np.flatnonzero(inside)))


def voters_around(
    points: Float64[np.ndarray, "*n 3"], readout: Readout
) -> Float64[np.ndarray, "*n"]:
    """Count the votes that a point would have if its landmark were surely there.

    These are those of the field voxels with a centre within the voting radius of the point and
    inside the grid, and inside the scan where the grid reaches past it. For a point outside, at
    least an eighth of a whole ball is counted: no point inside a grid larger than the radius has
    fewer voters, and a handful of voxels is no evidence. Voxels of a heatmap count as much as they
    weigh on average in an ideal one.

    Args:
        points: In grid voxels; NaN counts 1.
        readout: The grid, its field's stride and the voting radius.

    Returns:
        Counts, at least 1.
    """
    stride = readout.stride
    pitch = readout.metric_mm * stride
    size = -(-np.array(readout.shape) // stride)
    # The last field voxel of an axis may have its centre past the grid's end.
    size -= (size - 0.5) * stride - 0.5 > np.array(readout.shape) - 0.5
    flat = points.reshape(-1, 3)
    centres = (flat + 0.5) / stride - 0.5
    to_scan, shape = np.eye(4), np.empty(0)
    if readout.scan is not None:
        to_grid = translation([(stride - 1) / 2] * 3) @ scaling([stride] * 3)
        to_scan, shape = readout.scan.from_grid @ to_grid, np.array(readout.scan.shape, np.float64)
    counts = cpu_modes.count_voters(centres, size, pitch, readout.radius_mm, to_scan, shape)
    outside = np.isfinite(flat).all(1) & ~readout.contains(flat)
    octant = math.pi / 6 * readout.radius_mm**3 / math.prod(pitch)
    least = np.where(outside, max(1.0, octant), 1.0)
    voters = np.maximum(counts, least).reshape(points.shape[:-1])
    return np.asarray(readout.ideal_weight * voters)
