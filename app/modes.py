"""Heatmaps + Votes -> Modes: the few places that each landmark's votes agree on.

The heatmaps say roughly where (peak after peak, each hiding its surroundings from the next); mean
shift on the raw votes says exactly where: a mode moves to the weighted mean of the votes within
reach, a few times. Then everything known about the mode is summed over the votes within reach of
where it came to rest. Every sum is in fixed point, over all landmarks and modes at once, so the
order of the votes changes no bit.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from app.heatmaps import FIXED_ONE, Heatmaps, accumulate, in_blocks, to_fixed
from app.readout import Readout, voters_around
from app.votes import Votes

SHIFTS: Final = 4
"""Mean-shift steps; clean modes stand still after two."""

GATHER: Final = 3.0
"""Votes within this many reaches of a peak may join its mode: it would have to wander two reaches
before it missed one."""

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


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Votes near peaks, one row per vote and peak.

    Attributes:
        segment: landmark * modes + mode.
        position_mm: Where the vote points, along grid axes.
        source_mm: Where it comes from.
        weight: What it counts.
    """

    segment: Int64[Tensor, " pairs"]
    position_mm: Float64[Tensor, "pairs 3"]
    source_mm: Float64[Tensor, "pairs 3"]
    weight: Float64[Tensor, " pairs"]


def find_modes(votes: Votes, heatmaps: Heatmaps, readout: Readout, count: int) -> Modes:
    """Find the heaviest modes of every landmark.

    Args:
        votes: The votes that the heatmaps were made of.
        heatmaps: Where to start.
        readout: The grid and its voting radius.
        count: Most modes per landmark.

    Returns:
        The modes, heaviest first; ones that came to rest within reach of a heavier one are dropped.
    """
    peaks = find_peaks(heatmaps, readout, count)
    spacing = torch.tensor(readout.spacing_mm, dtype=torch.float64, device=peaks.device)
    centres = (peaks * spacing).view(-1, 3)
    pairs = _pair(votes, centres, readout, count)
    half_cell = heatmaps.cell * math.hypot(*readout.spacing_mm) / 2
    for step in range(SHIFTS):
        # A peak is known to half a cell only, so the first step looks that much further.
        reach = readout.reach_mm + (half_cell if step == 0 else 0.0)
        centres = _shift(pairs, centres, reach)
        if step == 0:
            centres = _merge(centres.view(-1, count, 3), readout.reach_mm / 2).view(-1, 3)
            pairs = _only(pairs, centres.isfinite().all(1)[pairs.segment])
    total = torch.zeros(readout.landmarks, dtype=torch.int64, device=peaks.device)
    for rows in in_blocks(len(votes)):
        accumulate(total, votes.landmark[rows], to_fixed(votes.weight[rows]))
    return _describe(pairs, centres, total, readout)


def find_peaks(
    heatmaps: Heatmaps, readout: Readout, count: int
) -> Float64[Tensor, "landmarks modes 3"]:
    """Find peaks: the highest cell, then the highest out of its reach, and so on.

    Args:
        heatmaps: Smoothed vote weights.
        readout: The grid and its reach.
        count: Peaks per landmark.

    Returns:
        Centres of the cells in grid voxels; NaN where all weight lies within reach of earlier
        peaks. Ties go to the lowest index.
    """
    values = heatmaps.values.flatten(1).clone()
    shape = heatmaps.values.shape[1:]
    around = _ball(heatmaps.cell, readout).to(values.device)
    sizes = torch.tensor(shape, device=values.device)
    peaks = torch.full((len(values), count, 3), math.nan, dtype=torch.float64, device=values.device)
    first = torch.tensor(heatmaps.first, device=values.device)
    for mode in range(count):
        height, index = _highest(values, shape[2])
        cells = torch.stack(torch.unravel_index(index, tuple(shape)), dim=1)
        centre = first + cells * heatmaps.cell + (heatmaps.cell - 1) / 2
        peaks[:, mode] = torch.where((height > 0)[:, None], centre.double(), math.nan)
        hidden = cells[:, None] + around
        inside = ((hidden >= 0) & (hidden < sizes)).all(2)
        flat = (hidden[..., 0] * shape[1] + hidden[..., 1]) * shape[2] + hidden[..., 2]
        values.scatter_(1, torch.where(inside, flat, index[:, None]), 0.0)
    return peaks


def _highest(
    values: Float[Tensor, "landmarks cells"], width: int
) -> tuple[Float[Tensor, " landmarks"], Int64[Tensor, " landmarks"]]:
    """Find the highest cell, first its row: amax is several times faster than argmax."""
    rows = values.view(len(values), -1, width)
    row = rows.amax(2).argmax(1)
    height, column = rows[torch.arange(len(values), device=row.device), row].max(1)
    return height, row * width + column


def _ball(cell: int, readout: Readout) -> Int64[Tensor, "n 3"]:
    """List the cells within reach of a cell."""
    sizes = [s * cell for s in readout.spacing_mm]
    spans = [torch.arange(-n, n + 1) for n in (math.floor(readout.reach_mm / s) for s in sizes)]
    cells = torch.cartesian_prod(*spans)
    distance = (cells * torch.tensor(sizes, dtype=torch.float64)).square().sum(1)
    return cells[distance <= readout.reach_mm**2]


def _pair(
    votes: Votes, centres: Float64[Tensor, "segments 3"], readout: Readout, count: int
) -> _Pairs:
    """Pair every vote with the peaks of its landmark that it is near to."""
    spacing = torch.tensor(readout.spacing_mm, dtype=torch.float64, device=centres.device)
    seeds = centres.view(-1, count, 3)
    limit = (GATHER * readout.reach_mm) ** 2
    segments, rows = [], []
    for block in in_blocks(len(votes)):
        landmark = votes.landmark[block]
        distance = votes.position[block].double()[:, None] * spacing - seeds[landmark]
        near = torch.nonzero(_square(distance) <= limit)  # Places without a peak are NaN: false.
        segments.append(landmark[near[:, 0]] * count + near[:, 1])
        rows.append(near[:, 0] + block.start)
    row = torch.cat([*rows, votes.landmark[:0]])
    return _Pairs(
        segment=torch.cat([*segments, votes.landmark[:0]]),
        position_mm=votes.position[row].double() * spacing,
        source_mm=votes.source[row].double() * spacing,
        weight=votes.weight[row].double(),
    )


def _square(vectors: Float64[Tensor, "*n 3"]) -> Float64[Tensor, "*n"]:
    """Square lengths, in an order of additions that no vector width changes."""
    x, y, z = vectors.unbind(-1)
    return x * x + y * y + z * z


def _within(
    pairs: _Pairs, centres: Float64[Tensor, "segments 3"], reach_mm: float
) -> tuple[Tensor, Float64[Tensor, "n 3"]]:
    """Find the pairs within reach of their mode, and their distances from it in reaches."""
    distance = pairs.position_mm - centres[pairs.segment]
    inside = _square(distance) <= reach_mm**2
    return inside, distance[inside] / reach_mm


def _sum(
    segment: Int64[Tensor, " n"], terms: Float64[Tensor, " n"], segments: int
) -> Float64[Tensor, " segments"]:
    """Sum terms by segment, exactly but for the fixed point."""
    total = torch.zeros(segments, dtype=torch.int64, device=segment.device)
    accumulate(total, segment, to_fixed(terms))
    return total.double() / FIXED_ONE


def _shift(
    pairs: _Pairs, centres: Float64[Tensor, "segments 3"], reach_mm: float
) -> Float64[Tensor, "segments 3"]:
    """Move every mode to the mean of the votes within reach; one without votes becomes NaN."""
    inside, distance = _within(pairs, centres, reach_mm)
    segment, weight = pairs.segment[inside], pairs.weight[inside]
    total = _sum(segment, weight, len(centres))
    moments = [_sum(segment, weight * distance[:, axis], len(centres)) for axis in range(3)]
    return centres + torch.stack(moments, dim=1) / total[:, None] * reach_mm


def _merge(
    centres: Float64[Tensor, "landmarks modes 3"], gap_mm: float
) -> Float64[Tensor, "landmarks modes 3"]:
    """Drop modes that are about to meet one from a higher peak: slopes of it, not peaks."""
    merged = centres.clone()
    for later in range(1, centres.shape[1]):
        square = _square(merged[:, :later] - merged[:, later, None])
        met = (square < gap_mm**2).any(1)
        merged[:, later] = torch.where(met[:, None], math.nan, merged[:, later])
    return merged


def _only(pairs: _Pairs, kept: Bool[Tensor, " pairs"]) -> _Pairs:
    return _Pairs(
        pairs.segment[kept], pairs.position_mm[kept], pairs.source_mm[kept], pairs.weight[kept]
    )


def _describe(
    pairs: _Pairs,
    centres: Float64[Tensor, "segments 3"],
    total: Int64[Tensor, " landmarks"],
    readout: Readout,
) -> Modes:
    """Sum what is known of each mode over the votes within reach, and rank the modes."""
    inside, distance = _within(pairs, centres, readout.reach_mm)
    segment, weight = pairs.segment[inside], pairs.weight[inside]
    away = (pairs.source_mm[inside] - centres[segment]) / readout.radius_mm
    terms = [weight]
    terms += [weight * away[:, axis] for axis in range(3)]
    terms += [weight * distance[:, a] * distance[:, b] for a, b in _SECOND]
    sums = torch.stack([_sum(segment, term, len(centres)) for term in terms], dim=1)
    landmarks = readout.landmarks
    sums_host = sums.cpu().numpy().reshape(landmarks, -1, len(terms))
    spacing = np.array(readout.spacing_mm)
    position_mm = centres.cpu().numpy().reshape(landmarks, -1, 3)
    order = _rank(position_mm, sums_host[..., 0], readout.reach_mm)
    kept = np.take_along_axis(sums_host, order[..., None], axis=1)
    kept[order < 0] = 0.0
    position_mm = np.where(
        (kept[..., :1] > 0), np.take_along_axis(position_mm, order[..., None], axis=1), np.nan
    )
    whole = np.maximum(total.cpu().numpy() / FIXED_ONE, 1 / FIXED_ONE)
    mass_weight = kept[..., 0]
    with np.errstate(invalid="ignore"):
        means = kept[..., 1:] / np.where(mass_weight > 0, mass_weight, np.nan)[..., None]
    covariance = np.empty((*mass_weight.shape, 3, 3))
    for column, (a, b) in enumerate(_SECOND, start=3):
        covariance[..., a, b] = covariance[..., b, a] = means[..., column] * readout.reach_mm**2
    position = position_mm / spacing
    return Modes(
        position=position,
        weight=mass_weight,
        mass=mass_weight / voters_around(position, readout),
        coherence=mass_weight / whole[:, None],
        covariance_mm2=covariance,
        source=position + means[..., :3] * readout.radius_mm / spacing,
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
