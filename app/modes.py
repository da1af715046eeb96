"""Votes -> Modes: the few places that each landmark's votes agree on.

Peaks say roughly where; mean shift on the raw votes says exactly where: a mode moves to the
weighted mean of the votes within reach, until it stands still. Then everything known about the mode
is summed over the votes within reach of where it came to rest. Every term of a sum is a whole
number of fixed-point units, over all landmarks and modes at once, so the order of the votes changes
no bit.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from app.ballots import Ballots, collect_ballots
from app.heatmaps import FIXED_ONE
from app.peaks import Cells, find_peaks
from app.readout import Readout, voters_around
from app.tally import sum_near, sum_up
from app.votes import Votes

SHIFTS: Final = 5
"""Most mean-shift steps; clean modes stand still after two."""

FIRST_LOOK: Final = 0.25
"""How far around a peak's cell the first step looks, in reaches: enough for the tip of a mode, and
not as far as the next one."""

SETTLED: Final = 1e-6
"""No mode moved by more of a reach than this: further steps would not change the answer."""

MEETING: Final = 0.5
"""After the first step, modes less than so many reaches apart are about to meet."""

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
    ballots = collect_ballots(votes)
    peaks = find_peaks(ballots, readout, count, cells)
    unit = np.array(readout.spacing_mm) / readout.reach_mm
    centres = np.moveaxis(peaks.centre_mm, 0, 2) / readout.reach_mm
    centres = _climb(ballots, centres, unit, peaks.error_mm / readout.reach_mm)
    sums = sum_up(ballots.landmark, ballots.position, ballots.source, ballots.weight, centres, unit)
    total = np.bincount(ballots.landmark, ballots.weight, readout.landmarks)
    return _describe(sums / FIXED_ONE, centres, total / FIXED_ONE, readout)


def _climb(
    ballots: Ballots,
    centres: Float64[np.ndarray, "landmarks modes 3"],
    unit: Float64[np.ndarray, " 3"],
    error: float,
) -> Float64[np.ndarray, "landmarks modes 3"]:
    """Move every mode to the mean of the votes within reach of it until all stand still."""
    for step in range(SHIFTS):
        # Around a peak's cell: what else may be within reach of its corner is not looked at yet.
        reach = error + FIRST_LOOK if step == 0 else 1.0
        sums = sum_near(ballots.landmark, ballots.position, ballots.weight, centres, unit, reach)
        with np.errstate(invalid="ignore"):  # A mode without votes becomes NaN.
            before, centres = centres, centres + sums[..., 1:] / sums[..., :1]
        if step == 0:
            centres = _merge(centres)
        elif not (np.abs(centres - before) > SETTLED).any():
            break
    return centres


def _merge(
    centres: Float64[np.ndarray, "landmarks modes 3"],
) -> Float64[np.ndarray, "landmarks modes 3"]:
    """Drop modes that are about to meet one from a higher peak: slopes of it, not peaks."""
    merged = centres.copy()
    for later in range(1, merged.shape[1]):
        gap = np.linalg.norm(merged[:, :later] - merged[:, later, None], axis=2)
        merged[(gap < MEETING).any(axis=1), later] = np.nan
    return merged


def _describe(
    sums: Float64[np.ndarray, "landmarks modes 10"],
    centres: Float64[np.ndarray, "landmarks modes 3"],
    total: Float64[np.ndarray, " landmarks"],
    readout: Readout,
) -> Modes:
    """Say what is known of each mode, and rank the modes."""
    spacing = np.array(readout.spacing_mm)
    places = centres * readout.reach_mm
    order = _rank(places, sums[..., 0], readout.reach_mm)
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


def _rank(
    position_mm: Float64[np.ndarray, "landmarks modes 3"],
    weight: Float64[np.ndarray, "landmarks modes"],
    reach_mm: float,
) -> Int64[np.ndarray, "landmarks modes"]:
    """Order modes by weight; -1 takes the place of ones within reach of a heavier one."""
    order = np.argsort(-weight, axis=1, kind="stable")
    position_mm = np.take_along_axis(position_mm, order[..., None], axis=1)
    weight = np.take_along_axis(weight, order, axis=1)
    alive = weight > 0
    for later in range(1, weight.shape[1]):
        gap = np.linalg.norm(position_mm[:, :later] - position_mm[:, later, None], axis=2)
        alive[:, later] &= ~((gap < reach_mm) & alive[:, :later]).any(1)
    back = np.argsort(~alive, axis=1, kind="stable")
    return np.where(
        np.take_along_axis(alive, back, axis=1), np.take_along_axis(order, back, axis=1), -1
    )
