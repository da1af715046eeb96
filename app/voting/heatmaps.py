"""Votes -> heatmaps: how much vote weight points at every voxel, for every landmark.

Heatmaps are an output for people and programs that want them; landmarks are not read from them but
from the votes themselves (``app.voting.modes``).

A vote adds its weight to the voxel nearest to its position, floor(v + 0.5), and to no other; one
outside the grid is left out, never clamped. Sums are kept in fixed point, so the order of votes
changes no bit.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from app.compute import run_split
from app.errors import BadParameter
from app.voting.cpu.heatmaps import sort_by_plane, sum_planes
from app.voting.readout import Readout
from app.voting.reference import FIXED_ONE
from app.voting.votes import Votes

VOTES_PER_THREAD: Final = 1 << 15
"""Fewer votes are not worth a thread of their own."""

KERNEL_SIGMAS: Final = 3.0
"""A Gaussian is truncated where its weight has fallen to exp(-4.5), a hundredth of its peak."""

MAX_TAPS: Final = 1 << 16
"""To one side: over any axis, a Gaussian that is truncated there is flat."""


def aggregate(
    votes: Votes, landmarks: Sequence[int], readout: Readout, smooth_mm: float = 0.0
) -> Float[Tensor, "chosen i j k"]:
    """Sum votes to heatmaps of some landmarks, voxel by voxel of the grid.

    Memory that no vote falls into is never touched.

    Args:
        votes: Votes for the landmarks of ``readout``, on the host.
        landmarks: Which landmarks, each once; their order is that of the heatmaps.
        readout: The grid.
        smooth_mm: Sigma of a Gaussian; 0 leaves the sums as they are.

    Returns:
        Vote weight per voxel, float32; votes outside the grid are left out.

    Raises:
        BadParameter: A landmark is none of the read-out's or comes twice, votes are for others, or
            the sigma is no length.
    """
    votes.check(readout.landmarks)
    if len({*landmarks} & {*range(readout.landmarks)}) < len(landmarks):
        raise BadParameter(
            f"landmarks: expected numbers from 0 to {readout.landmarks - 1}, each once, "
            f"got {list(landmarks)!r:.80}"
        )
    if not 0 <= smooth_mm < math.inf:
        raise BadParameter(
            f"smooth_mm: expected a length in mm, 0 or more and finite; got {smooth_mm!r}"
        )
    number = np.full(readout.landmarks, -1)
    number[list(landmarks)] = np.arange(len(landmarks))
    depth, height, width = readout.shape
    by_plane = sort_by_plane(
        number[votes.landmark.numpy()],
        votes.columns.numpy(),
        np.float32(FIXED_ONE),
        (len(landmarks), depth, height, width),
    )
    starts = by_plane[0]
    heatmaps = np.zeros((len(landmarks) * depth, height * width), dtype=np.float32)

    def sum_part(first: int, last: int) -> None:
        begin, end = np.searchsorted(starts, np.minimum((first, last), starts[-1]))
        sum_planes(*by_plane, 1 / FIXED_ONE, begin, end, heatmaps)

    run_split(sum_part, len(votes), VOTES_PER_THREAD)
    sums = torch.from_numpy(heatmaps).view(len(landmarks), depth, height, width)
    return smooth(sums, [smooth_mm / spacing for spacing in readout.spacing_mm])


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
        kernel = kernel_of(sigma)
        smoothed = values * kernel[0]
        for t in range(1, min(len(kernel), size)):
            ahead, behind = values.narrow(axis, t, size - t), values.narrow(axis, 0, size - t)
            smoothed.narrow(axis, 0, size - t).add_(ahead, alpha=kernel[t])
            smoothed.narrow(axis, t, size - t).add_(behind, alpha=kernel[t])
        values = smoothed
    return values


def kernel_of(sigma: float) -> list[float]:
    """Compute the weights of a Gaussian from its centre to one side; both sides sum to one.

    ``sigma`` is in voxels, above 0.
    """
    taps = math.ceil(min(KERNEL_SIGMAS * sigma, MAX_TAPS))
    # A product, as the power of a float raises OverflowError where a product is infinite.
    kernel = [math.exp(-0.5 * (t / sigma) * (t / sigma)) for t in range(taps + 1)]
    norm = kernel[0] + 2 * sum(kernel[1:])
    return [weight / norm for weight in kernel]
