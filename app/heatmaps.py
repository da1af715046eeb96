"""Votes -> Heatmaps: how much vote weight points at every place, for every landmark.

A vote adds its weight to the voxel nearest to its position, floor(v + 0.5), and to no other. Sums
are kept in fixed point, so the same votes in any order and any batch give the same bits: adding
integers commutes, adding floats does not. A vote outside the box that is counted is left out, never
clamped. Two boxes are counted: the grid itself (``aggregate``, what clients may look at), and
the grid with a margin, so that a landmark just outside the field of view has a peak like any other
(``make_heatmaps``, from which ``app.modes`` starts).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from app.readout import Readout
from app.votes import Votes, select_votes

FIXED_ONE: Final = 1 << 24
"""Fixed-point units per 1.0: float32's own resolution near 1; int64 then holds 2^39 unit votes."""

HEATMAP_BYTES: Final = 192 << 20
"""Most bytes that the fixed-point heatmaps of all landmarks may take."""

VOTES_AT_ONCE: Final = 1 << 18
"""Rows worked on at once: their temporaries stay within a few MB however many votes there are."""

KERNEL_SIGMAS: Final = 3.0
"""A Gaussian is cut where its weight has fallen to exp(-4.5), a hundredth of its peak."""

COARSE_SIGMA: Final = 0.7
"""Least smoothing of coarse cells, in cells: joins a peak that eight cells share at a corner."""


@dataclass(frozen=True, slots=True)
class Heatmaps:
    """Smoothed vote weight of every landmark on the grid and a margin around it.

    Attributes:
        values: Weight per cell.
        first: Grid index of the first voxel of the first cell; negative by the margin.
        cell: Edge of a cell in grid voxels.
    """

    values: Float[Tensor, "landmarks a b c"]
    first: tuple[int, int, int]
    cell: int


def make_heatmaps(votes: Votes, readout: Readout, cell: int | None = None) -> Heatmaps:
    """Sum votes into cells over the grid and a margin of the voting radius, and smooth them.

    Args:
        votes: Votes for the landmarks of ``readout``.
        readout: The grid and its voting radius.
        cell: Edge of a cell in voxels; None: as coarse as the read-out allows, or the memory asks.

    Returns:
        The heatmaps.
    """
    cell = cell or choose_cell(readout)
    first, shape = _box(readout, cell)
    values = to_float(splat(votes, readout.landmarks, shape, first, cell))
    least = COARSE_SIGMA if cell > 1 else 0.0
    sigmas = [max(least, readout.smooth_mm / (s * cell)) for s in readout.spacing_mm]
    return Heatmaps(smooth(values, sigmas), first, cell)


def aggregate(
    votes: Votes, landmarks: Sequence[int], readout: Readout
) -> Float[Tensor, "chosen i j k"]:
    """Make the dense heatmaps of some landmarks, voxel by voxel of the grid.

    Args:
        votes: Votes for the landmarks of ``readout``.
        landmarks: Which landmarks, in the order wanted, each once.
        readout: The grid and the smoothing.

    Returns:
        Smoothed vote weight per voxel, float32; votes outside the grid are left out.
    """
    place = torch.full((readout.landmarks,), -1, device=votes.landmark.device)
    place[list(landmarks)] = torch.arange(len(landmarks), device=place.device)
    chosen = select_votes(votes, place[votes.landmark] >= 0)
    total = torch.zeros(len(landmarks) * math.prod(readout.shape), dtype=torch.int64)
    total = total.to(place.device)
    for rows in in_blocks(len(chosen)):
        index, inside = cell_index(chosen.position[rows], readout.shape)
        index += place[chosen.landmark[rows]] * math.prod(readout.shape)
        accumulate(total, index[inside], to_fixed(chosen.weight[rows][inside]))
    sigmas = [readout.smooth_mm / spacing for spacing in readout.spacing_mm]
    return smooth(to_float(total.view(len(landmarks), *readout.shape)), sigmas)


def splat(
    votes: Votes,
    landmarks: int,
    shape: Sequence[int],
    first: Sequence[int] = (0, 0, 0),
    cell: int = 1,
) -> Int64[Tensor, "landmarks a b c"]:
    """Add every vote's weight to the cell that holds the voxel nearest to its position.

    Args:
        votes: Votes for landmarks below ``landmarks``.
        landmarks: How many landmarks there are.
        shape: Shape of the box in cells; votes outside it are left out.
        first: Grid index of the box's first voxel.
        cell: Edge of a cell in grid voxels.

    Returns:
        Fixed-point sums; ``to_float`` reads them.
    """
    cells = math.prod(shape)
    total = torch.zeros(landmarks * cells, dtype=torch.int64, device=votes.landmark.device)
    for rows in in_blocks(len(votes)):
        index, inside = cell_index(votes.position[rows], shape, first, cell)
        index += votes.landmark[rows] * cells
        accumulate(total, index[inside], to_fixed(votes.weight[rows][inside]))
    return total.view(landmarks, *shape)


def cell_index(
    position: Float[Tensor, "n 3"],
    shape: Sequence[int],
    first: Sequence[int] = (0, 0, 0),
    cell: int = 1,
) -> tuple[Int64[Tensor, " n"], Tensor]:
    """Number the cell that a position rounds to, and say whether it lies in the box."""
    index = torch.zeros(len(position), dtype=torch.int64, device=position.device)
    inside = torch.ones(len(position), dtype=torch.bool, device=position.device)
    for axis in range(3):
        # float64, because 0.49999997 + 0.5 is 1 in float32.
        nearest = (position[:, axis].double() + 0.5).floor_()
        place = nearest.sub_(first[axis]).div_(cell).floor_()
        inside &= (place >= 0) & (place < shape[axis])
        index.mul_(shape[axis]).add_(place.clamp_(-1, shape[axis]).long())
    return index, inside


def accumulate(total: Int64[Tensor, " cells"], index: Int64[Tensor, " n"], terms: Tensor) -> None:
    """Add fixed-point terms to the cells they name, in place: the one sum of all voting."""
    total.index_add_(0, index, terms)


def to_fixed(values: Float[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Turn numbers into fixed point, to the nearest 2^-24."""
    return (values * FIXED_ONE).round_().long()


def to_float(fixed: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Turn fixed point into float32."""
    return fixed.float().div_(FIXED_ONE)


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
        size = values.shape[axis]
        taps = min(math.ceil(KERNEL_SIGMAS * sigma), size - 1)
        kernel = [math.exp(-0.5 * (t / sigma) ** 2) for t in range(taps + 1)] if sigma else [1.0]
        norm = kernel[0] + 2 * sum(kernel[1:])
        smoothed = values * (kernel[0] / norm)
        for t in range(1, len(kernel)):
            ahead, behind = values.narrow(axis, t, size - t), values.narrow(axis, 0, size - t)
            smoothed.narrow(axis, 0, size - t).add_(ahead, alpha=kernel[t] / norm)
            smoothed.narrow(axis, t, size - t).add_(behind, alpha=kernel[t] / norm)
        values = smoothed
    return values


def choose_cell(readout: Readout) -> int:
    """Choose the edge of heatmap cells, in voxels.

    Cells only have to bring the read-out near a mode: it goes on from the raw votes. So they are as
    coarse as keeps every corner of a cell within half the read-out's reach of its centre, and
    coarser where the heatmaps of all landmarks would not fit their budget.
    """
    diagonal = math.hypot(*readout.spacing_mm)
    cell = 1
    while cell * diagonal <= readout.reach_mm / 2:
        cell *= 2
    while readout.landmarks * math.prod(_box(readout, cell)[1]) * 8 > HEATMAP_BYTES:
        cell *= 2
    return cell


def in_blocks(count: int) -> Iterator[slice]:
    """Cut rows into blocks whose temporaries are small."""
    for start in range(0, count, VOTES_AT_ONCE):
        yield slice(start, start + VOTES_AT_ONCE)


def shift_and_sum(
    x: Float[Tensor, "batch channels h w"], mask: Tensor, step: int
) -> Float[Tensor, "batch 1 h wide"]:
    """Shift channel i right by i * step and sum all channels: the known case P3.

    It is voting with one constant offset per channel, so a whole channel is added at once: the
    targets of a slice are a slice. The sums are the same fixed-point ones.

    Args:
        x: Values, of a size for which 2^-24 per term is fine.
        mask: What the values are multiplied by; broadcasts against ``x``.
        step: Shift per channel in pixels.

    Returns:
        The sums, wide = w + (channels - 1) * step.
    """
    batch, channels, height, width = x.shape
    masks = torch.broadcast_to(mask, x.shape)
    wide = width + (channels - 1) * step
    summed = x.new_zeros(batch, 1, height, wide, dtype=torch.float32)
    for row in range(batch):
        total = torch.zeros(height, wide, dtype=torch.int64, device=x.device)
        for i in range(channels):
            total[:, i * step : i * step + width] += to_fixed(x[row, i] * masks[row, i])
        summed[row, 0] = to_float(total)
    return summed


def _box(readout: Readout, cell: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Lay cells over the grid and a margin of the radius: first voxel, and shape in cells."""
    margins = [cell * math.ceil(readout.radius_mm / (s * cell)) for s in readout.spacing_mm]
    a, b, c = (
        -(-(size + 2 * margin) // cell) for size, margin in zip(readout.shape, margins, strict=True)
    )
    return (-margins[0], -margins[1], -margins[2]), (a, b, c)
