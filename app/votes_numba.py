"""Field -> Votes on a CPU, compiled: the scores are read once, and nothing is kept but votes.

The torch code of ``app.survivors`` and ``app.votes`` says what is computed, and serves devices that
have no kernel. Here a first pass counts what may pass in each row of voxels, so that the second,
which looks at those rows alone, writes every vote where it will stay. Rows are shared out among
torch's threads.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from app.activation_loops import NONE, SIGMOID, SOFTMAX
from app.errors import NetworkFailed
from app.filter_loops import fill_rows, list_rows
from app.network import Field
from app.row_loops import count_rows
from app.survivors import Profiles, score_limit
from app.threads import for_parts, share_out

ACTIVATIONS: Final = {"none": NONE, "sigmoid": SIGMOID, "softmax": SOFTMAX}

VOXELS_PER_THREAD: Final = 1 << 17
"""Fewer are not worth a thread of their own: they take less than a millisecond."""

VOTES_PER_THREAD: Final = 1 << 12
"""Likewise of votes."""

LEAST_PROBABILITY: Final = 1e-30
"""What every vote has at least: less, and a score's limit would not hold in float32."""

Columns = tuple[Int64[np.ndarray, " n"], Float32[np.ndarray, "8 n"]]
"""Landmarks; source, position, probability and weight."""

Profile = Float32[np.ndarray, " voxels"]


class Line(NamedTuple):
    """The memory that a tensor spans as one line of numbers.

    Attributes:
        numbers: The line; of types of 16 bits, their bits.
        table: What bits mean; None for types that NumPy knows.
        steps: The tensor's strides.
    """

    numbers: np.ndarray
    table: Float32[np.ndarray, " halves"] | None
    steps: tuple[int, ...]


class Plan(NamedTuple):
    """What the loops need to know; a tuple, as they take no other structure.

    Attributes:
        scores: Of the field.
        offsets: Of the field.
        sizes: Channels, voxels along j and k, first channel of a landmark, activation.
        runs: Where the numbers lie that are compared, from the first number of a row of voxels on:
            those of each landmark; or one run of all channels where these lie side by side.
        step: From one such number to the next.
        limits: Least score that may pass, for every number of a run.
        background: What is taken off them: the scores again, whose first channel it is, or as many
            zeros.
        moves: 1 if the background goes along with the rows, else 0.
        threshold: Least probability.
        places: Grid voxels per field voxel, grid index of the first field voxel's centre, and grid
            voxels per unit of offset, the last two along each axis.
        profiles: What a voxel counts, along each axis.
    """

    scores: Line
    offsets: Line
    sizes: tuple[int, int, int, int, int]
    runs: Int64[np.ndarray, " runs"]
    step: int
    limits: Float32[np.ndarray, " numbers"]
    background: np.ndarray
    moves: int
    threshold: np.float32
    places: tuple[np.float32, Float32[np.ndarray, " 3"], Float32[np.ndarray, " 3"]]
    profiles: tuple[Profile, ...]


def collect_votes(
    field: Field,
    threshold: float,
    stride: int,
    origin: Sequence[int],
    importance: Profiles | None,
) -> Columns:
    """Do what ``app.votes.filter_votes`` does, with the same arguments, on the CPU.

    Returns:
        The landmark of each vote; and one row each of its source's and its position's three
        coordinates, its probability and its weight.

    Raises:
        NetworkFailed: As ``filter_votes``.
    """
    plan = make_plan(field, threshold, stride, origin, importance)
    _, depth, height, width = field.scores.shape
    bounds = share_out(depth * height, max(1, VOXELS_PER_THREAD // width))
    # before[r]: what may pass in the rows before row r; which are then shared out by that.
    before = np.zeros(depth * height + 1, dtype=np.int64)

    def count(part: int) -> None:
        count_rows(plan, bounds[part], bounds[part + 1], before[1:])

    for_parts(count, len(bounds) - 1)
    np.cumsum(before, out=before)
    room = int(before[-1])
    rows = np.searchsorted(before, share_out(room, VOTES_PER_THREAD))
    rows[-1] = depth * height
    votes = (np.empty(room, np.int64), np.empty((8, room), np.float32))

    def fill(part: int) -> tuple[int, bool]:
        end, bad = fill_rows(plan, rows[part], rows[part + 1], before, votes)
        return int(end), bool(bad)

    ends = for_parts(fill, len(rows) - 1)
    if any(bad for _, bad in ends):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    return _without_gaps(votes, before[rows].tolist(), [end for end, _ in ends])


def list_votes(
    landmark: Int64[np.ndarray, " n"],
    position: Float32[np.ndarray, "3 n"],
    probability: Float32[np.ndarray, " n"],
    sample_shape: Sequence[int],
) -> Float32[np.ndarray, "rows 5"]:
    """Do what ``app.votes.vote_rows`` does, on the CPU."""
    rows = np.empty((len(landmark), 5), dtype=np.float32)
    end = np.array(sample_shape, dtype=np.float32)
    return rows[: list_rows(landmark, position, probability, end, rows)]


def make_plan(
    field: Field,
    threshold: float,
    stride: int,
    origin: Sequence[int],
    importance: Profiles | None,
) -> Plan:
    """Say what the loops need to know."""
    channels, *shape = field.scores.shape
    lead = int(field.background)
    steps = field.scores.stride()
    runs, step = np.arange(lead, channels) * steps[0], steps[3]
    pattern = np.full(1, score_limit(field, threshold), dtype=np.float32)
    softmax = field.activation == "softmax"
    if not softmax and steps[0] == 1 and steps[3] == channels:
        runs, step = np.zeros(1, dtype=np.int64), 1
        pattern = np.repeat(pattern, channels)
        pattern[:lead] = np.inf
    limits = np.tile(pattern, shape[2])
    if field.activation != "none":
        threshold = max(threshold, LEAST_PROBABILITY)
    scores = line_of(field.scores)
    centre = np.array([first + 0.5 * stride - 0.5 for first in origin], dtype=np.float32)
    return Plan(
        scores=scores,
        offsets=line_of(field.offsets),
        sizes=(channels, shape[1], shape[2], lead, ACTIVATIONS[field.activation]),
        runs=runs,
        step=step,
        limits=limits,
        background=scores.numbers if softmax else np.zeros_like(scores.numbers, shape=len(limits)),
        moves=int(softmax),
        threshold=np.float32(threshold),
        places=(np.float32(stride), centre, np.array(field.offset_scale, dtype=np.float32)),
        profiles=(
            tuple(np.ones(size, dtype=np.float32) for size in shape)
            if importance is None
            else tuple(profile.numpy() for profile in importance)
        ),
    )


def line_of(tensor: Tensor) -> Line:
    """View the memory that a tensor spans as one line of numbers."""
    span = 1 + sum(
        step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    line = tensor.detach().as_strided((span,), (1,))
    if tensor.element_size() != 2:
        return Line(line.numpy(), None, tensor.stride())
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(tensor.dtype)
    bits = line.view(torch.int16).numpy().view(np.uint16)
    return Line(bits, halves.float().numpy(), tensor.stride())


def _without_gaps(
    votes: tuple[np.ndarray, np.ndarray], starts: Sequence[int], ends: Sequence[int]
) -> Columns:
    """Close the gaps that remain after parts in which less passed than might have."""
    landmark, columns = votes
    count = ends[0]
    for start, end in zip(starts[1:-1], ends[1:], strict=True):
        if count < start:
            landmark[count : count + end - start] = landmark[start:end]
            columns[:, count : count + end - start] = columns[:, start:end]
        count += end - start
    return landmark[:count], columns[:, :count]
