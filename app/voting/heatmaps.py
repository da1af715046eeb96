"""Votes -> Heatmaps: how much vote weight points at every voxel, for every landmark.

A vote adds its weight to the voxel nearest to its position, floor(v + 0.5), and to no other. Sums
are kept in fixed point, so the same votes in any order and any batch give the same bits: adding
integers commutes, adding floats does not. A vote outside the grid is left out, never clamped.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from app.compute import run_parts, split_range
from app.voting.cpu.heatmaps import sort_by_plane, sum_planes
from app.voting.indices import true_indices
from app.voting.readout import Readout
from app.voting.votes import Votes

FIXED_ONE: Final = 1 << 24
"""Fixed-point units per 1.0: float32's own resolution near 1; int64 then holds 2^39 unit votes."""

COUNTER_BYTES: Final = 256 << 20
"""Fixed-point counters in memory at once, but for one landmark's at least: the heatmaps of more
landmarks are counted one group after the other."""

VOTES_PER_THREAD: Final = 1 << 15
"""Fewer votes are not worth a thread of their own."""

VOTES_AT_ONCE: Final = 1 << 18
"""Rows worked on at once: their temporaries stay within a few MB however many votes there are."""

KERNEL_SIGMAS: Final = 3.0
"""A Gaussian is cut where its weight has fallen to exp(-4.5), a hundredth of its peak."""


def aggregate(
    votes: Votes, landmarks: Sequence[int], readout: Readout, smooth_mm: float = 0.0
) -> Float[Tensor, "chosen i j k"]:
    """Make the dense heatmaps of some landmarks, voxel by voxel of the grid.

    Args:
        votes: Votes for the landmarks of ``readout``.
        landmarks: Which landmarks, in the order wanted, each once.
        readout: The grid.
        smooth_mm: Sigma of a Gaussian; 0 leaves the sums as they are.

    Returns:
        Smoothed vote weight per voxel, float32; votes outside the grid are left out.
    """
    place = torch.full((readout.landmarks,), -1, device=votes.landmark.device)
    place[list(landmarks)] = torch.arange(len(landmarks), device=place.device)
    which = place.index_select(0, votes.landmark)
    shape = (len(landmarks), *readout.shape)
    on_host = which.device.type == "cpu"
    heatmaps = (add_up if on_host else add_up_plainly)(votes, which, shape)
    return smooth(heatmaps, [smooth_mm / spacing for spacing in readout.spacing_mm])


def add_up(
    votes: Votes, which: Int64[Tensor, " votes"], shape: tuple[int, int, int, int]
) -> Float[Tensor, "chosen i j k"]:
    """Make unsmoothed heatmaps on the CPU; memory that no vote falls into is never touched."""
    chosen, depth, height, width = shape
    position, weight = votes.position.T.numpy(), votes.weight.numpy()
    ordered = sort_by_plane(which.numpy(), position, weight, np.float32(FIXED_ONE), shape)
    heatmaps = np.zeros((chosen * depth, height * width), dtype=np.float32)
    shares = split_range(len(weight), VOTES_PER_THREAD)
    bounds = np.searchsorted(ordered[0], np.minimum(shares, ordered[0][-1]))
    bounds[-1] = len(heatmaps)

    def add(part: int) -> None:
        sum_planes(*ordered, 1 / FIXED_ONE, bounds[part], bounds[part + 1], heatmaps)

    run_parts(add, len(shares) - 1)
    return torch.from_numpy(heatmaps).view(shape)


def add_up_plainly(
    votes: Votes, which: Int64[Tensor, " votes"], shape: tuple[int, int, int, int]
) -> Float[Tensor, "chosen i j k"]:
    """Make unsmoothed heatmaps on any device, as many at once as there may be counters."""
    chosen, *space = shape
    heatmaps = torch.empty(shape, device=which.device)
    together = max(1, min(chosen, COUNTER_BYTES // (8 * math.prod(space))))
    counters = torch.zeros(together, *space, dtype=torch.int64, device=which.device)
    for first in range(0, chosen, together):
        last = min(first + together, chosen)
        if first:
            counters.zero_()
        count_votes(votes, which - first, counters[: last - first])
        torch.mul(counters[: last - first], 1 / FIXED_ONE, out=heatmaps[first:last])
    return heatmaps


def count_votes(
    votes: Votes, which: Int64[Tensor, " votes"], counters: Int64[Tensor, "heatmaps i j k"]
) -> None:
    """Add every vote's weight to the voxel nearest to its position, in place.

    Args:
        votes: The votes.
        which: The heatmap of each vote; votes for one that is not there are left out.
        counters: Fixed-point sums; votes outside of them are left out.
    """
    heatmaps, *shape = counters.shape
    line = counters.view(-1)
    for rows in in_blocks(len(votes)):
        index, inside = voxel_index(votes.position[rows], shape)
        inside &= (which[rows] >= 0) & (which[rows] < heatmaps)
        kept = true_indices(inside)
        index += which[rows] * math.prod(shape)
        terms = to_fixed(votes.weight[rows].index_select(0, kept))
        accumulate(line, index.index_select(0, kept), terms)


def voxel_index(
    position: Float[Tensor, "n 3"], shape: Sequence[int]
) -> tuple[Int64[Tensor, " n"], Bool[Tensor, " n"]]:
    """Number the voxel that a position rounds to, and say whether there is one."""
    # float64, because 0.49999997 + 0.5 is 1 in float32.
    nearest = position.T.double().add_(0.5).floor_()
    end = torch.tensor(shape, device=position.device)[:, None]
    inside = ((nearest >= 0) & (nearest < end)).all(0)
    i, j, k = nearest.long()
    return i.mul_(shape[1]).add_(j).mul_(shape[2]).add_(k), inside


def accumulate(total: Int64[Tensor, " cells"], index: Int64[Tensor, " n"], terms: Tensor) -> None:
    """Add fixed-point terms to the cells they name, in place: the one sum of all voting."""
    total.index_add_(0, index, terms)


def to_fixed(values: Float[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Turn numbers into fixed point, to the nearest 2^-24."""
    return (values * FIXED_ONE).round_().long()


def smooth(
    values: Float[Tensor, "landmarks a b c"], sigmas: Sequence[float]
) -> Float[Tensor, "landmarks a b c"]:
    """Smooth by a separable Gaussian with zeros around; a tap after the other, so bits never vary.

    Args:
        values: What to smooth.
        sigmas: Width per axis in cells; 0 leaves an axis as it is.

    Returns:
        The smoothed values; the kernel sums to one.
    """
    for axis, sigma in enumerate(sigmas, start=1):
        if sigma == 0.0:
            continue
        size = values.shape[axis]
        taps = min(math.ceil(KERNEL_SIGMAS * sigma), size - 1)
        kernel = [math.exp(-0.5 * (t / sigma) ** 2) for t in range(taps + 1)]
        norm = kernel[0] + 2 * sum(kernel[1:])
        smoothed = values * (kernel[0] / norm)
        for t in range(1, len(kernel)):
            ahead, behind = values.narrow(axis, t, size - t), values.narrow(axis, 0, size - t)
            smoothed.narrow(axis, 0, size - t).add_(ahead, alpha=kernel[t] / norm)
            smoothed.narrow(axis, t, size - t).add_(behind, alpha=kernel[t] / norm)
        values = smoothed
    return values


def in_blocks(count: int) -> Iterator[slice]:
    """Cut rows into blocks whose temporaries are small."""
    for start in range(0, count, VOTES_AT_ONCE):
        yield slice(start, start + VOTES_AT_ONCE)
