"""Field -> Votes on a CPU, compiled: the scores are read once, and nothing is kept but votes.

The torch code of ``app.voting.reference`` and ``app.voting.votes`` says what is computed, and
serves devices that have no kernel. Here a first pass counts what may pass in each row of voxels, so
that the second, which looks at those rows alone, writes every vote where it will stay. Rows are
shared out among torch's threads.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from app.compute import run_parts, split_range
from app.errors import NetworkFailed
from app.model import Field
from app.voting.cpu.activations import BFLOAT16, FLOAT16, NONE, SIGMOID, SOFTMAX
from app.voting.cpu.rows import BATCH, count_rows
from app.voting.cpu.votes import fill_rows, list_rows
from app.voting.reference import Profiles, score_limit

BITS: Final = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
ACTIVATIONS: Final = {"none": NONE, "sigmoid": SIGMOID, "softmax": SOFTMAX}

VOXELS_PER_THREAD: Final = 1 << 17
"""Fewer are not worth a thread of their own: they take less than a millisecond."""

VOTES_PER_THREAD: Final = 1 << 12
"""Likewise of votes."""

ROW_NUMBERS: Final = 1 << 10
"""Of rows that may be as long as we like: few enough for the nearest cache with all else."""

ROWS_AT_ONCE: Final = 1 << 15
"""Room for rows, of which nobody knows how many there will be, is made in pieces of as many."""

LEAST_PROBABILITY: Final = 1e-30
"""What every vote has at least: less, and a score's limit would not hold in float32."""

Columns = tuple[Int64[np.ndarray, " n"], Float32[np.ndarray, "8 n"]]
"""Landmarks; source, position, probability and weight."""

Profile = Float32[np.ndarray, " voxels"]


class Line(NamedTuple):
    """The memory that a tensor spans as one line of numbers.

    Attributes:
        numbers: The line; of types of 16 bits, their bits.
        steps: The tensor's strides.
    """

    numbers: np.ndarray
    steps: tuple[int, ...]


class Rows(NamedTuple):
    """How the scores are walked: a row is some voxels that lie evenly in memory, in their order.

    These are all along k; or, where all voxels lie evenly, as many as fit the nearest cache: every
    row costs a little of its own.

    Attributes:
        voxels: In all.
        width: Voxels of a row; the last row may have fewer.
        height: Rows of a plane.
        plane_step: From one plane to the next, in numbers.
        row_step: Likewise of rows.
    """

    voxels: int
    width: int
    height: int
    plane_step: int
    row_step: int

    @property
    def number(self) -> int:
        """Count the rows."""
        return -(-self.voxels // self.width)


class Plan(NamedTuple):
    """What the loops need to know; a tuple, as they take no other structure.

    Attributes:
        scores: Of the field.
        offsets: Of the field.
        sizes: Channels, voxels along j and k, first channel of a landmark, activation.
        rows: How the scores are walked.
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
        profiles: What a voxel counts, along each axis; may go on beyond the field.
    """

    scores: Line
    offsets: Line
    sizes: tuple[int, int, int, int, int]
    rows: Rows
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
    """Do what ``app.voting.votes.filter_votes`` does, with the same arguments, on the CPU.

    Returns:
        The landmark of each vote; and one row each of its source's and its position's three
        coordinates, its probability and its weight.

    Raises:
        NetworkFailed: As ``filter_votes``.
    """
    plan = make_plan(field, threshold, stride, origin, importance)
    bounds = split_range(plan.rows.number, max(1, VOXELS_PER_THREAD // plan.rows.width))
    # before[r]: what may pass in the rows before row r; which are then shared out by that.
    before = np.zeros(plan.rows.number + 1, dtype=np.int64)

    def count(part: int) -> None:
        count_rows(plan, bounds[part], bounds[part + 1], before[1:])

    run_parts(count, len(bounds) - 1)
    np.cumsum(before, out=before)
    room = int(before[-1])
    rows = np.searchsorted(before, split_range(room, VOTES_PER_THREAD))
    rows[-1] = plan.rows.number
    votes = (np.empty(room, np.int64), np.empty((8, room), np.float32))

    def fill(part: int) -> tuple[int, bool]:
        end, bad = fill_rows(plan, rows[part], rows[part + 1], before, votes)
        return int(end), bool(bad)

    ends = run_parts(fill, len(rows) - 1)
    if any(bad for _, bad in ends):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    return _without_gaps(votes, before[rows].tolist(), [end for end, _ in ends])


def collect_rows(
    field: Field, threshold: float, sample_shape: Sequence[int], origin: Sequence[int]
) -> Float32[np.ndarray, "rows 5"]:
    """Do what ``app.voting.votes.filter_rows`` does, with the same arguments, on the CPU."""
    plan = make_plan(field, threshold, 1, origin, None)
    bounds = split_range(plan.rows.number, max(1, VOXELS_PER_THREAD // plan.rows.width))
    room = max(ROWS_AT_ONCE, field.offsets.shape[1] * (BATCH + len(plan.limits)) + 1)
    end = np.array(sample_shape, dtype=np.float32)

    def fill(part: int) -> tuple[list[np.ndarray], bool]:
        row, last = bounds[part], bounds[part + 1]
        lists, bad = [], False
        while row < last:
            rows = np.empty((room, 5), dtype=np.float32)
            row, count, wrong = list_rows(plan, row, last, end, rows)
            lists.append(rows[:count])
            bad |= bool(wrong)
        return lists, bad

    parts = run_parts(fill, len(bounds) - 1)
    if any(bad for _, bad in parts):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    return np.concatenate([rows for lists, _ in parts for rows in lists])


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
    runs, step, per_voxel = np.arange(lead, channels) * steps[0], steps[3], 1
    softmax = field.activation == "softmax"
    if not softmax and steps[0] == 1 and steps[3] == channels:
        runs, step, per_voxel = np.zeros(1, dtype=np.int64), 1, channels
    rows = _rows_of(field.scores, per_voxel)
    limit = threshold  # For probabilities this is exact, so that no room is left empty.
    if field.activation != "none":
        limit = score_limit(field, threshold)
        threshold = max(threshold, LEAST_PROBABILITY)
    limits = np.full((rows.width, per_voxel), limit, dtype=np.float32)
    if per_voxel > 1:
        limits[:, :lead] = np.inf
    scores = line_of(field.scores)
    centre = np.array([first + 0.5 * stride - 0.5 for first in origin], dtype=np.float32)
    return Plan(
        scores=scores,
        offsets=line_of(field.offsets),
        sizes=(channels, shape[1], shape[2], lead, ACTIVATIONS[field.activation]),
        rows=rows,
        runs=runs,
        step=step,
        limits=limits.ravel(),
        background=scores.numbers if softmax else np.zeros(limits.size, scores.numbers.dtype),
        moves=int(softmax),
        threshold=np.float32(threshold),
        places=(np.float32(stride), centre, np.array(field.offset_scale, dtype=np.float32)),
        profiles=(
            (np.ones(max(shape), dtype=np.float32),) * 3
            if importance is None
            else tuple(profile.numpy() for profile in importance)
        ),
    )


def _rows_of(scores: Tensor, per_voxel: int) -> Rows:
    """Say how to walk scores of which some are compared for every voxel side by side."""
    _, depth, height, width = scores.shape
    _, *steps = scores.stride()
    voxels = depth * height * width
    if steps[0] == height * steps[1] and steps[1] == width * steps[2]:
        size = max(1, min(voxels, ROW_NUMBERS // per_voxel))
        return Rows(voxels, size, -(-voxels // size), 0, size * steps[2])
    return Rows(voxels, width, height, steps[0], steps[1])


def line_of(tensor: Tensor) -> Line:
    """View the memory that a tensor spans as one line of numbers."""
    span = 1 + sum(
        step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    line = tensor.detach().as_strided((span,), (1,))
    bits = BITS.get(tensor.dtype)
    numbers = line.numpy() if bits is None else line.view(torch.int16).numpy().view(bits)
    return Line(numbers, tensor.stride())


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
