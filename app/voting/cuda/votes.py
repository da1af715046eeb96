"""Field -> Votes on CUDA, compiled: one kernel reads the scores once and keeps nothing but votes.

The torch code of ``app.voting.reference`` and ``app.voting.votes`` says what is computed. Here a
program takes a block of voxels that lie side by side in memory and compares their scores with a
limit. Where anything may pass, and that is almost nowhere, it goes through the block again in
chunks: computes probabilities in float64, reads the offsets of what passes, and appends votes to a
room behind one counter. Chunks arrive there in any order; as each says how many votes it had, a
second kernel puts them where they belong. The counter also says when the room was too small: then
all is done again.

The kernels are in ``app.voting.cuda.votes_kernels``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import triton
from jaxtyping import Float32, Int64
from torch import Tensor

from app.compute import HostCopy
from app.errors import NetworkFailed
from app.model import Field
from app.voting.cuda.votes_kernels import append_votes, order_votes
from app.voting.reference import Profiles, score_limit

ACTIVATIONS: Final = {"none": 0, "sigmoid": 1, "softmax": 2}

CAPACITY: Final = 1 << 16
"""Votes for which there is room at first, 3 MB; every tile of a batch has such a room."""

TILE: Final = 4096
"""Scores that a program looks at together: 32 for each of its 128 threads, in 16-byte loads."""

CHUNK: Final = 512
"""Scores of which it computes probabilities together: few registers, so that many programs fit."""

VECTOR_BYTES: Final = 16
"""Most bytes that a thread loads at once."""

ORDER_BLOCK: Final = 256
"""Votes that a program puts in order."""

Columns = tuple[Int64[Tensor, " n"], Float32[Tensor, "8 n"]]
"""Landmarks; source, position, probability and weight."""


@dataclass(frozen=True, slots=True)
class Walk:
    """How a field's voxels are walked: along lines of equal steps, each cut into blocks.

    Attributes:
        axes: The grid axes in the order of the walk, slowest first.
        lines: How many lines there are, in two nested levels.
        length: Voxels per line.
        steps: Between scores in memory: lines of both levels, voxels of a line, channels.
        last: Whether the channels of a voxel lie side by side, rather than voxels of a channel.
        align: Elements of which all steps but the smallest are multiples, as loads want it.
        width: Channels that are looked at together.
    """

    axes: tuple[int, ...]
    lines: tuple[int, int]
    length: int
    steps: tuple[int, int, int, int]
    last: bool
    align: int
    width: int

    @property
    def block(self) -> int:
        """Voxels that a program takes."""
        return min(max(1, TILE // self.width), _power_of_two(self.length))


def begin_votes(
    field: Field,
    threshold: float,
    stride: int,
    origin: Sequence[int],
    importance: Profiles | None,
) -> Callable[[], Columns]:
    """Begin to do what ``app.voting.votes.filter_votes`` does, with the same arguments, on CUDA.

    Returns:
        A function that waits for the number of votes, and gives the landmark of each; and one row
        each of its source's and its position's three coordinates, its probability and its weight.
        It raises NetworkFailed as ``filter_votes``.
    """
    walk = plan_walk(field)
    places = places_of(field, walk.axes, stride, origin, importance)

    def begin(capacity: int) -> tuple[tuple[Tensor, ...], HostCopy]:
        with torch.cuda.device_of(field.scores):
            room = append(field, threshold, walk, places, capacity)
            return room, HostCopy(room[-1][:2])

    def end() -> Columns:
        (room, numbers), capacity = first, CAPACITY
        while True:
            found, bad = numbers.wait()
            if bad:
                raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
            if found <= capacity:
                break
            capacity = _power_of_two(found)  # Any other number may have to be compiled for.
            room, numbers = begin(capacity)
        with torch.cuda.device_of(field.scores):
            landmark, columns, key = put_in_order(room, found, field.offsets.shape[1])
        if walk.axes == (0, 1, 2):
            return landmark, columns
        order = key.argsort()
        return landmark.index_select(0, order), columns.index_select(1, order)

    first = begin(CAPACITY)
    return end


def plan_walk(field: Field) -> Walk:
    """Say how to walk so that neighbours in the walk are neighbours in memory.

    Args:
        field: Scores and offsets, in any memory layout.

    Returns:
        The walk; along the grid's axes in their order unless another is the fastest.
    """
    channels, *sizes = field.scores.shape
    channel, *steps = field.scores.stride()
    axes: tuple[int, ...] = (0, 1, 2)
    if any(size > 1 and step < steps[2] for size, step in zip(sizes, steps, strict=True)):
        # The rows then come in another order, and are sorted in the end.
        axes = tuple(sorted(axes, key=lambda axis: -steps[axis]))
    outer, inner, length = (sizes[axis] for axis in axes)
    outer_step, inner_step, voxel = (steps[axis] for axis in axes)
    if inner == 1 or inner_step == length * voxel:
        length, inner = length * inner, 1
        if outer == 1 or outer_step == length * voxel:
            length, outer = length * outer, 1
    used = (outer_step * (outer > 1), inner_step * (inner > 1))
    last = channel < voxel and channels > 1
    align = 1
    if min(channel, voxel) == 1 or channels == voxel == 1:
        # A mask, too, has to be the same for all that is loaded at once.
        wide = math.gcd(*used, voxel if last else channel, 0 if last else length)
        align = math.gcd(wide, VECTOR_BYTES // field.scores.element_size())
    if last:
        width = min(TILE, _power_of_two(channels))
    else:
        width = min(8, _power_of_two(channels - field.background))
    return Walk(axes, (outer, inner), length, (*used, voxel, channel), last, align, width)


def places_of(
    field: Field,
    axes: Sequence[int],
    stride: int,
    origin: Sequence[int],
    importance: Profiles | None,
) -> tuple[Any, ...]:
    """Say how a voxel's place in the walk becomes a key, a source, a position and a weight.

    Args:
        field: As of ``filter_votes``, like all but ``axes``.
        axes: The grid axes in the order of the walk.
        stride: Grid voxels per field voxel.
        origin: Grid index of the tile's first voxel.
        importance: What a field voxel counts along each axis.

    Returns:
        Voxels per step of the two slower axes; the stride; for each axis of the walk: which one it
        is, what it adds to a voxel's number, the offsets' step, centre, scale and importances; the
        offsets' steps between axes and between landmarks.
    """
    _, *sizes = field.scores.shape
    numbers = (sizes[1] * sizes[2], sizes[2], 1)
    across, between, *steps = field.offsets.stride()
    return (
        (sizes[axes[1]] * sizes[axes[2]], sizes[axes[2]]),
        stride,
        tuple(axes),
        tuple(numbers[axis] for axis in axes),
        tuple(steps[axis] for axis in axes),
        tuple(_single(origin[axis] + 0.5 * stride - 0.5) for axis in axes),
        tuple(_single(field.offset_scale[axis]) for axis in axes),
        tuple(None if importance is None else importance[axis].contiguous() for axis in axes),
        (across, between),
    )


def _power_of_two(count: int) -> int:
    """Find the least power of two that is no less than a count."""
    return 1 << (count - 1).bit_length()


def _single(number: float) -> float:
    """Round to float32, as torch does with a number that meets a tensor of float32."""
    return float(np.float32(number))


def append(
    field: Field, threshold: float, walk: Walk, places: tuple[Any, ...], capacity: int
) -> tuple[Tensor, ...]:
    """Append votes to a room; the device is not waited for.

    Args:
        field: Scores and offsets.
        threshold: Least probability of a vote.
        walk: From ``plan_walk``.
        places: From ``places_of``.
        capacity: How many votes the room holds.

    Returns:
        Columns, keys and chunks of the votes; and the table: how many votes there are, whether a
        score is no number, then how many votes each chunk has, then where in the room they begin.
    """
    channels, device = field.scores.shape[0], field.scores.device
    wide = _power_of_two(channels)
    chunk = min(walk.block, max(1, CHUNK // wide))
    parts = -(-walk.length // walk.block)
    programs = walk.lines[0] * walk.lines[1] * parts
    chunks = programs * (walk.block // chunk)
    columns = torch.empty(8, capacity, device=device)
    keys = torch.empty(capacity, dtype=torch.int64, device=device)
    chunk_of = torch.empty_like(keys)
    table = torch.zeros(2 + 2 * chunks, dtype=torch.int64, device=device)
    # A loosened limit may be loosened further: only the probability decides.
    limit = np.nextafter(np.float32(score_limit(field, threshold)), np.float32(-np.inf))
    *line_steps, voxel, channel = walk.steps
    shrunk = (voxel // walk.align, channel) if walk.last else (voxel, channel // walk.align)
    append_votes[(programs,)](
        field.scores,
        field.offsets,
        (columns, keys, chunk_of, table, table[2:], table[2 + chunks :], capacity),
        (walk.lines[1], parts, walk.length if walk.last else walk.length // walk.align),
        (*(step // walk.align for step in line_steps), *shrunk),
        (float(limit), _single(threshold)),
        places,
        activation=ACTIVATIONS[field.activation],
        lead=int(field.background),
        channels=channels,
        last=walk.last,
        align=walk.align,
        tile=(walk.block, walk.width, chunk, wide),
        enable_fp_fusion=False,  # So that sums and products round as torch's do.
    )
    return columns, keys, chunk_of, table


def put_in_order(
    room: tuple[Tensor, ...], found: int, landmarks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Move votes from the room to where they belong.

    Args:
        room: From ``append``.
        found: How many votes there are.
        landmarks: How many landmarks there are.

    Returns:
        Landmarks, columns and keys, by the number of the voxel in the walk, then by landmark.
    """
    columns, keys, chunk_of, table = room
    counts, starts = table[2:].chunk(2)
    # What is added to a row of the room: votes of the chunks before this one, less those in room.
    moves = counts.cumsum(0).sub_(counts).sub_(starts)
    ordered = torch.empty(8, found, device=columns.device)
    landmark = torch.empty(found, dtype=torch.int64, device=columns.device)
    key = torch.empty_like(landmark)
    if found:
        order_votes[(triton.cdiv(found, ORDER_BLOCK),)](
            (columns, keys, chunk_of, moves),
            (ordered, landmark, key),
            columns.shape[1],
            found,
            landmarks,
            block=ORDER_BLOCK,
            enable_fp_fusion=False,
        )
    return landmark, ordered, key
