"""Votes -> heatmaps: how much vote weight points at every voxel, for every landmark.

Heatmaps are an output for people and programs that want them; landmarks are not read from them but
from the votes themselves (``app.voting.modes``).

A vote adds its weight to the voxel nearest to its position, floor(v + 0.5), and to no other; one
outside the grid is left out, never clamped. Sums are kept in fixed point, so the order of votes
changes no bit.
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
from app.voting.readout import Readout
from app.voting.reference import FIXED_ONE, to_fixed, true_indices
from app.voting.votes import Votes

COUNTER_BYTES: Final = 256 << 20
"""Fixed-point counters in memory at once, but those of one landmark at least: the heatmaps of more
landmarks are summed one group after the other."""

VOTES_PER_THREAD: Final = 1 << 15
"""Fewer votes are not worth a thread of their own."""

VOTES_PER_BLOCK: Final = 1 << 18
"""Votes summed at once: their temporaries stay within a few MB however many votes there are."""

KERNEL_SIGMAS: Final = 3.0
"""A Gaussian is truncated where its weight has fallen to exp(-4.5), a hundredth of its peak."""


def aggregate(
    votes: Votes, landmarks: Sequence[int], readout: Readout, smooth_mm: float = 0.0
) -> Float[Tensor, "chosen i j k"]:
    """Sum votes to heatmaps of some landmarks, voxel by voxel of the grid.

    Args:
        votes: Votes for the landmarks of ``readout``.
        landmarks: Which landmarks, each once; their order is that of the heatmaps.
        readout: The grid.
        smooth_mm: Sigma of a Gaussian; 0 leaves the sums as they are.

    Returns:
        Vote weight per voxel, float32; votes outside the grid are left out.
    """
    index = torch.full((readout.landmarks,), -1, device=votes.landmark.device)
    index[list(landmarks)] = torch.arange(len(landmarks), device=index.device)
    heatmap = index.index_select(0, votes.landmark)
    shape = (len(landmarks), *readout.shape)
    on_cpu = heatmap.device.type == "cpu"
    heatmaps = (sum_compiled if on_cpu else sum_by_torch)(votes, heatmap, shape)
    return smooth(heatmaps, [smooth_mm / spacing for spacing in readout.spacing_mm])


def sum_compiled(
    votes: Votes, heatmap: Int64[Tensor, " votes"], shape: tuple[int, int, int, int]
) -> Float[Tensor, "chosen i j k"]:
    """Sum votes on the CPU; memory that no vote falls into is never touched.

    Args:
        votes: The votes.
        heatmap: The heatmap of each vote; votes for any other than those of ``shape`` are left out.
        shape: Heatmaps, and voxels along i, j and k.
    """
    chosen, depth, height, width = shape
    position, weight = votes.position.T.numpy(), votes.weight.numpy()
    by_plane = sort_by_plane(heatmap.numpy(), position, weight, np.float32(FIXED_ONE), shape)
    starts = by_plane[0]
    heatmaps = np.zeros((chosen * depth, height * width), dtype=np.float32)
    shares = split_range(len(weight), VOTES_PER_THREAD)
    bounds = np.searchsorted(starts, np.minimum(shares, starts[-1]))
    bounds[-1] = len(heatmaps)

    def sum_part(part: int) -> None:
        sum_planes(*by_plane, 1 / FIXED_ONE, bounds[part], bounds[part + 1], heatmaps)

    run_parts(sum_part, len(shares) - 1)
    return torch.from_numpy(heatmaps).view(shape)


def sum_by_torch(
    votes: Votes, heatmap: Int64[Tensor, " votes"], shape: tuple[int, int, int, int]
) -> Float[Tensor, "chosen i j k"]:
    """Do as ``sum_compiled`` in plain torch, on any device: the reference for compiled code."""
    chosen, *space = shape
    heatmaps = torch.empty(shape, device=heatmap.device)
    group = max(1, min(chosen, COUNTER_BYTES // (8 * math.prod(space))))
    counters = torch.zeros(group, *space, dtype=torch.int64, device=heatmap.device)
    for first in range(0, chosen, group):
        last = min(first + group, chosen)
        if first:
            counters.zero_()
        add_votes(votes, heatmap - first, counters[: last - first])
        torch.mul(counters[: last - first], 1 / FIXED_ONE, out=heatmaps[first:last])
    return heatmaps


def add_votes(
    votes: Votes, heatmap: Int64[Tensor, " votes"], counters: Int64[Tensor, "heatmaps i j k"]
) -> None:
    """Add every vote's weight to the voxel nearest to its position, in place.

    Args:
        votes: The votes.
        heatmap: The heatmap of each vote; votes for one that is not there are left out.
        counters: Fixed-point sums; votes outside of them are left out.
    """
    heatmaps, *shape = counters.shape
    flat = counters.view(-1)
    for rows in _blocks(len(votes)):
        index, inside = nearest_voxel(votes.position[rows], shape)
        inside &= (heatmap[rows] >= 0) & (heatmap[rows] < heatmaps)
        kept = true_indices(inside)
        index += heatmap[rows] * math.prod(shape)
        terms = to_fixed(votes.weight[rows].index_select(0, kept))
        flat.index_add_(0, index.index_select(0, kept), terms)


def nearest_voxel(
    position: Float[Tensor, "n 3"], shape: Sequence[int]
) -> tuple[Int64[Tensor, " n"], Bool[Tensor, " n"]]:
    """Return the flat index of the voxel that a position rounds to, and whether there is one."""
    # float64, because 0.49999997 + 0.5 is 1 in float32.
    nearest = position.T.double().add_(0.5).floor_()
    end = torch.tensor(shape, device=position.device)[:, None]
    inside = ((nearest >= 0) & (nearest < end)).all(0)
    i, j, k = nearest.long()
    return i.mul_(shape[1]).add_(j).mul_(shape[2]).add_(k), inside


def smooth(
    values: Float[Tensor, "landmarks a b c"], sigmas: Sequence[float]
) -> Float[Tensor, "landmarks a b c"]:
    """Smooth by a separable Gaussian with zero padding; tap by tap, so that bits never vary.

    Args:
        values: What to smooth.
        sigmas: Width per axis in voxels; 0 leaves an axis as it is.

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


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, VOTES_PER_BLOCK):
        yield slice(start, start + VOTES_PER_BLOCK)
