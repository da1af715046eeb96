"""Votes -> modes, in NumPy float64: the third part of the reference of the whole path."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.support.oracle import Array, voters
from tests.support.reference_votes import ReferenceVotes

MODES = 4
"""Per landmark, at most, where a model does not say how many."""

STEPS = 5
"""Of mean shift, at most."""

ON_FACE = 1e-9
"""Voxels by which a point may lie outside a face that it lies on, by rounding."""

SETTLED = 1e-6
"""Modes that move less, in reaches, stand still."""

WIDTH_PRIOR, TINY, WIDEST = 1e-3, 1e-5, 8.0
"""Of the fit to a heatmap: how much its trained width counts, as a share of the votes' weight; what
is added to have a solution; and the square of how many times as wide it may be."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Where the votes for a landmark agree.

    Attributes:
        position: In grid voxels, (3,).
        weight: Of the votes within reach.
        mass: Weight per voxel that could have voted for the position.
        coherence: Share of all weight.
        spread_mm: Root mean square distance of the votes from their mean; None: not known.
        source: Mean of the voxels that vote, in grid voxels, (3,); None: there are none.
    """

    position: Array
    weight: float
    mass: float
    coherence: float
    spread_mm: float | None
    source: Array | None


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a scan lies in a grid that reaches past it.

    Attributes:
        from_grid: Grid voxel index -> index of the scan.
        shape: Of the scan.
    """

    from_grid: Array
    shape: tuple[int, ...]

    def holds(self, points: Array) -> NDArray[np.bool_]:
        """Say which points, in grid voxels, lie in the scan."""
        index = points @ self.from_grid[:3, :3].T + self.from_grid[:3, 3]
        end = np.array(self.shape) - 0.5
        return np.asarray(((index >= -0.5 - ON_FACE) & (index <= end + ON_FACE)).all(axis=-1))


@dataclass(frozen=True, slots=True)
class ReferenceReadout:
    """How the votes of a grid are read.

    Attributes:
        shape: Of the grid.
        metric_mm: Edges of a voxel as distances between votes count, (3,).
        spacing_mm: Edges of a voxel, (3,).
        radius_mm: The voting radius.
        reach_mm: Within which votes count for a mode.
        stride: Grid voxels per field voxel.
        threshold: To which a heatmap falls at the radius; None: votes are not of a heatmap.
        scan: Where the scan lies, if the grid reaches past it.
        modes: Per landmark, at most.
    """

    shape: tuple[int, ...]
    metric_mm: Array
    spacing_mm: Array
    radius_mm: float
    reach_mm: float
    stride: int
    threshold: float | None
    scan: Extent | None = None
    modes: int = MODES


def votes_for(votes: ReferenceVotes, landmark: int, readout: ReferenceReadout) -> ReferenceVotes:
    """Choose the votes for a landmark that come from the scan and not from its padding."""
    last = np.array(readout.shape) - 0.5
    chosen = (votes.landmark == landmark) & np.isfinite(votes.position).all(axis=1)
    chosen &= ((votes.source >= -0.5) & (votes.source <= last)).all(axis=1)
    if readout.scan is not None:
        chosen &= readout.scan.holds(votes.source)
    columns = ("landmark", "source", "position", "probability", "weight")
    return ReferenceVotes(*[getattr(votes, name)[chosen] for name in columns])


def find_modes(votes: ReferenceVotes, readout: ReferenceReadout) -> list[Mode]:
    """Find the modes of one landmark's votes, heaviest first."""
    mm, reach = votes.position * readout.metric_mm, readout.reach_mm
    centres, error_mm = _find_peaks(votes, readout)
    for step in range(STEPS):
        before, within = centres, reach if step else error_mm + 0.25 * reach
        moved = [_mean_within(mm, votes.weight, centre, within) for centre in before]
        centres = [centre for centre in moved if centre is not None]
        if step == 0:
            centres = _apart(centres, 0.5 * reach)
        elif step >= 2 and len(centres) == len(before):
            away = [np.abs(a - b).max() for a, b in zip(before, centres, strict=True)]
            if max(away, default=0.0) <= SETTLED * reach:
                break
    near = [np.linalg.norm(mm - centre, axis=1) <= reach for centre in centres]
    weights = [float(votes.weight[one].sum()) for one in near]
    heaviest = sorted(range(len(centres)), key=lambda one: -weights[one])
    kept = _apart([centres[one] for one in heaviest if weights[one] > 0], reach)
    return [_describe_mode(votes, centre, readout) for centre in kept]


def _mean_within(mm: Array, weight: Array, centre: Array, reach: float) -> Array | None:
    near = np.linalg.norm(mm - centre, axis=1) <= reach
    if weight[near].sum() <= 0:
        return None
    return np.asarray(np.average(mm[near], axis=0, weights=weight[near]))


def _apart(points: Sequence[Array], least: float) -> list[Array]:
    """Keep the points that are no nearer than that to one before them."""
    kept: list[Array] = []
    for point in points:
        if all(np.linalg.norm(point - other) >= least for other in kept):
            kept.append(point)
    return kept


def _find_peaks(votes: ReferenceVotes, readout: ReferenceReadout) -> tuple[list[Array], float]:
    """Find the highest cells in mm, and how far a peak may be from the centre of its cell."""
    metric, shape = readout.metric_mm, np.array(readout.shape)
    edge = np.maximum(1.0, np.round(0.6 * readout.reach_mm / metric))
    margin = np.ceil(readout.radius_mm / (metric * edge)) + 1
    first = -edge * margin
    cells = (np.ceil(shape / edge) + 2 * margin).astype(int)
    cell = np.floor((votes.position - first + 0.5) / edge).astype(int)
    inside = ((cell >= 1) & (cell < cells - 1)).all(axis=1)
    totals = np.zeros(cells)
    np.add.at(totals, tuple(cell[inside].T), votes.weight[inside])
    heights = np.zeros(cells)
    for shift in itertools.product((-1, 0, 1), repeat=3):
        share = math.prod(2 - abs(one) for one in shift)
        heights += share * np.roll(totals, shift, axis=(0, 1, 2))
    hit = np.argwhere(totals > 0)
    centres = (hit * edge + first + (edge - 1) / 2) * metric
    height = heights[tuple(hit.T)]
    peaks: list[Array] = []
    while len(peaks) < readout.modes and height.max(initial=0.0) > 0:
        peaks.append(centres[height.argmax()])
        near = np.linalg.norm(centres - peaks[-1], axis=1) <= readout.reach_mm
        height = np.where(near, 0.0, height)
    return peaks, float(np.linalg.norm(edge * metric)) / 2


def _describe_mode(votes: ReferenceVotes, centre_mm: Array, readout: ReferenceReadout) -> Mode:
    """Tell all of a mode around a centre."""
    away = votes.position * readout.metric_mm - centre_mm
    near = np.linalg.norm(away, axis=1) <= readout.reach_mm
    weight = float(votes.weight[near].sum())
    share = votes.weight[near] / weight
    off_mm = away[near] / readout.metric_mm * readout.spacing_mm
    position = centre_mm / readout.metric_mm
    if readout.threshold is not None:
        position = position + _fit_gaussian(votes, away, near, readout) / readout.metric_mm
    return Mode(
        position=position,
        weight=weight,
        mass=weight / (_ideal_weight(readout.threshold) * _count_voters(position, readout)),
        coherence=weight / float(votes.weight.sum()),
        spread_mm=math.sqrt(share @ (off_mm**2).sum(axis=1)),
        source=share @ votes.source[near],
    )


def _fit_gaussian(
    votes: ReferenceVotes, away: Array, near: Array, readout: ReferenceReadout
) -> Array:
    """Fit a Gaussian to the logarithms of a heatmap; gives its peak in mm from the mode."""
    reach, x = readout.reach_mm, away[near] / readout.reach_mm
    known = math.log(readout.threshold or 1.0) * (reach / readout.radius_mm) ** 2
    importance = votes.probability[near] * votes.weight[near]
    total = importance.sum()
    basis = np.column_stack([np.ones(len(x)), x, (x**2).sum(axis=1)])
    products = basis.T @ (importance[:, None] * basis)
    right = basis.T @ (importance * np.log(votes.probability[near]))
    products[4, 4] += WIDTH_PRIOR * total
    right[4] += WIDTH_PRIOR * total * known
    fit = np.linalg.solve(products + TINY * total * np.eye(5), right)
    move = -fit[1:4] / (2 * min(fit[4], known / WIDEST))
    return move * reach if np.linalg.norm(move) <= 1 else np.zeros(3)


def _ideal_weight(threshold: float | None) -> float:
    """Average a Gaussian over the ball in which it reaches the threshold; 1 of other votes."""
    if threshold is None:
        return 1.0
    edge = math.sqrt(-2 * math.log(threshold))
    total = math.sqrt(math.pi / 2) * math.erf(edge / math.sqrt(2))
    return 3 * (total - edge * threshold) / edge**3


def _count_voters(position: Array, readout: ReferenceReadout) -> float:
    """Count the field voxels that could vote; for a position outside, an eighth of a ball's."""
    metric, radius, stride = readout.metric_mm, readout.radius_mm, readout.stride
    holds = None if readout.scan is None else readout.scan.holds
    count = voters(position, readout.shape, metric, radius, stride, holds)
    octant = math.pi / 6 * radius**3 / float(np.prod(metric * stride))
    is_in = is_inside(position, readout.shape, readout.scan)
    return max(count, 1.0 if is_in else octant, 1.0)


def is_inside(position: Array, shape: tuple[int, ...], scan: Extent | None = None) -> bool:
    """Say whether a position lies in a grid, and in the scan where the grid reaches past it."""
    is_in_scan = scan is None or bool(scan.holds(position))
    return is_in_scan and bool(Extent(np.eye(4), shape).holds(position))
