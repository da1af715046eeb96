"""Field -> Votes on CUDA: one kernel reads the scores once and keeps nothing but votes.

``app.voting.reference`` defines in torch what is computed. Here a program takes a block of voxels
that lie side by side in memory and compares their scores with a limit. Where any may pass, which is
almost nowhere, it goes through the block again in chunks: it computes probabilities in float64,
reads the offsets of what passes, and appends votes to a buffer behind one atomic counter, in any
order. The counter also tells if the buffer was too small: then all is done again with a larger one.

The kernel is in ``app.voting.cuda.votes_kernels``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from app.compute import HostCopy
from app.errors import NetworkFailed
from app.model import Field
from app.voting.cuda.votes_kernels import append_votes
from app.voting.reference import Columns, Placement, score_limit

ACTIVATIONS: Final = {"none": 0, "sigmoid": 1, "softmax": 2}

CAPACITY: Final = 1 << 16
"""Votes that fit the first buffer, of 2.6 MB; every tile of a batch has one."""

TILE: Final = 4096
"""Scores that a program compares together: 32 for each of its 128 threads, in 16-byte loads."""

CHUNK: Final = 512
"""Scores whose probabilities it computes together: few registers, for high occupancy."""

VECTOR_BYTES: Final = 16
"""Most bytes that a thread loads at once."""

Geometry = tuple[Any, ...]
"""What a kernel computes positions from: numbers, tuples of them, and tensors or None."""


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """The order in which voxels are read: along lines of equal strides, each divided into blocks.

    Attributes:
        axes: The grid axes in this order, slowest first.
        lines: How many lines there are, in two nested levels.
        length: Voxels per line.
        strides: Between scores in memory: lines of both levels, voxels of a line, channels.
        channels_last: Whether the channels of a voxel lie side by side, or voxels of a channel do.
        alignment: Divides all strides but the smallest, so that the compiler may align loads.
        width: Channels compared together.
    """

    axes: tuple[int, ...]
    lines: tuple[int, int]
    length: int
    strides: tuple[int, int, int, int]
    channels_last: bool
    alignment: int
    width: int

    @property
    def block(self) -> int:
        """Voxels per program."""
        return min(max(1, TILE // self.width), _power_of_two(self.length))


def launch_filter(field: Field, threshold: float, placement: Placement) -> Callable[[], Columns]:
    """Do as ``app.voting.votes.launch_filter``; what it returns waits for the number of votes."""
    order = plan_memory_order(field)
    geometry = plan_geometry(field, order.axes, placement)

    def launch(capacity: int) -> tuple[Tensor, Tensor, HostCopy]:
        with torch.cuda.device_of(field.scores):
            columns, landmark, count = append(field, threshold, order, geometry, capacity)
            return columns, landmark, HostCopy(count)

    def collect() -> Columns:
        (columns, landmark, numbers), capacity = first, CAPACITY
        while True:
            found, invalid = numbers.wait()
            if invalid:
                raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
            if found <= capacity:
                return landmark[:found].clone(), columns[:, :found].contiguous()
            capacity = _power_of_two(found)  # Any other number may have to be compiled for.
            columns, landmark, numbers = launch(capacity)

    first = launch(CAPACITY)
    return collect


def plan_memory_order(field: Field) -> MemoryOrder:
    """Choose an order in which neighbouring voxels are neighbours in memory, whatever its layout.

    Returns:
        The order; that of the grid's axes unless another axis is the fastest.
    """
    channels, *sizes = field.scores.shape
    channel, *strides = field.scores.stride()
    axes: tuple[int, ...] = (0, 1, 2)
    if any(size > 1 and stride < strides[2] for size, stride in zip(sizes, strides, strict=True)):
        axes = tuple(sorted(axes, key=lambda axis: -strides[axis]))
    outer, inner, length = (sizes[axis] for axis in axes)
    outer_stride, inner_stride, voxel = (strides[axis] for axis in axes)
    if inner == 1 or inner_stride == length * voxel:
        length, inner = length * inner, 1
        if outer == 1 or outer_stride == length * voxel:
            length, outer = length * outer, 1
    used = (outer_stride * (outer > 1), inner_stride * (inner > 1))
    last = channel < voxel and channels > 1
    alignment = 1
    if min(channel, voxel) == 1 or channels == voxel == 1:
        # A mask, too, has to be the same for all that is loaded at once.
        common = math.gcd(*used, voxel if last else channel, 0 if last else length)
        alignment = math.gcd(common, VECTOR_BYTES // field.scores.element_size())
    if last:
        width = min(TILE, _power_of_two(channels))
    else:
        width = min(8, _power_of_two(channels - field.background))
    return MemoryOrder(
        axes, (outer, inner), length, (*used, voxel, channel), last, alignment, width
    )


def plan_geometry(field: Field, axes: Sequence[int], placement: Placement) -> Geometry:
    """Prepare how a voxel's index becomes a source, a position and a weight.

    Args:
        field: Scores and offsets.
        axes: The grid axes in memory order.
        placement: Where the field lies in the grid.

    Returns:
        Voxels per step of the two slower axes; the stride; for each axis in memory order: which one
        it is, the offsets' stride, centre, scale and importances; the offsets' strides between axes
        and between landmarks.
    """
    _, *sizes = field.scores.shape
    across, between, *strides = field.offsets.stride()
    first, importance = placement.first_centre, placement.importance
    return (
        (sizes[axes[1]] * sizes[axes[2]], sizes[axes[2]]),
        # A float: of a 1 beside tuples, Triton 3.6 makes constants at the wrong places.
        float(placement.stride),
        tuple(axes),
        tuple(strides[axis] for axis in axes),
        tuple(_float32(first[axis]) for axis in axes),
        tuple(_float32(field.offset_scale[axis]) for axis in axes),
        tuple(None if importance is None else importance[axis].contiguous() for axis in axes),
        (across, between),
    )


def _power_of_two(count: int) -> int:
    """Return the least power of two that is no less than a count."""
    return 1 << (count - 1).bit_length()


def _float32(number: float) -> float:
    """Round to float32, as torch does with a number that meets a tensor of float32."""
    return float(np.float32(number))


def append(
    field: Field, threshold: float, order: MemoryOrder, geometry: Geometry, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Append votes to new buffers, without synchronising.

    Args:
        field: Scores and offsets.
        threshold: Least probability of a vote.
        order: From ``plan_memory_order``.
        geometry: From ``plan_geometry``.
        capacity: How many votes the buffers hold.

    Returns:
        Columns and landmarks of the votes, in any order; and how many there are, and whether a
        score is not a number.
    """
    channels, device = field.scores.shape[0], field.scores.device
    wide = _power_of_two(channels)
    chunk = min(order.block, max(1, CHUNK // wide))
    parts = -(-order.length // order.block)
    columns = torch.empty(8, capacity, device=device)
    landmark = torch.empty(capacity, dtype=torch.int64, device=device)
    count = torch.zeros(2, dtype=torch.int64, device=device)
    # The limit may be lowered further: only the probability decides.
    limit = np.nextafter(np.float32(score_limit(field, threshold)), np.float32(-np.inf))
    *line_strides, voxel, channel = order.strides
    # All strides but the smallest come in units of the alignment, so that loads are known aligned.
    last, alignment = order.channels_last, order.alignment
    smallest = (voxel // alignment, channel) if last else (voxel, channel // alignment)
    append_votes[(order.lines[0] * order.lines[1] * parts,)](
        field.scores,
        field.offsets,
        (columns, landmark, count, capacity),
        (order.lines[1], parts, order.length if last else order.length // alignment),
        (*(stride // alignment for stride in line_strides), *smallest),
        (float(limit), _float32(threshold)),
        geometry,
        activation=ACTIVATIONS[field.activation],
        first_channel=int(field.background),
        channels=channels,
        last=last,
        align=alignment,
        tile=(order.block, order.width, chunk, wide),
        enable_fp_fusion=False,  # So that sums and products round as torch's do.
    )
    return columns, landmark, count
