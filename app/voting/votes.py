"""Field -> Votes: where the voxels that pass the threshold say the landmarks are.

Offsets are read for survivors alone. The rows of ``filter_votes`` are ordered by voxel (i, then j,
then k), then by landmark, whatever the memory layout. Nothing downstream depends on the order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from app.compute import has_triton
from app.model import Field
from app.voting.cpu.plan import collect_rows, collect_votes
from app.voting.indices import true_indices
from app.voting.reference import Profiles, collect

Rows = Float[Tensor, "rows 5"]
"""Votes as rows: landmark, probability, and position i, j, k in voxels."""


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes of one or more tiles, one row each, on the device; positions in grid voxels (i j k).

    Attributes:
        landmark: Which landmark the vote is for.
        source: Centre of the field voxel that casts the vote.
        position: Where it says the landmark is; may lie outside the grid.
        probability: Probability of the landmark at the source.
        weight: Probability times the tile's importance at the source.
    """

    landmark: Int64[Tensor, " votes"]
    source: Float[Tensor, "votes 3"]
    position: Float[Tensor, "votes 3"]
    probability: Float[Tensor, " votes"]
    weight: Float[Tensor, " votes"]

    def __len__(self) -> int:
        """Count the votes."""
        return len(self.landmark)


def filter_votes(
    field: Field,
    threshold: float,
    *,
    stride: int = 1,
    origin: Sequence[int] = (0, 0, 0),
    importance: Profiles | None = None,
) -> Votes:
    """Collect the votes of a field: every voxel and landmark that reaches the threshold.

    Field voxel u has its centre at grid index ``origin + (u + 0.5) * stride - 0.5``. A vote whose
    position is not finite is dropped; one outside the grid is kept.

    Args:
        field: Scores and offsets of one tile, or of one array.
        threshold: Least probability of a vote, compared in float32.
        stride: Grid voxels per field voxel.
        origin: Grid index of the tile's first voxel.
        importance: What a field voxel counts, as one profile per axis; None: 1 everywhere.

    Returns:
        The votes, ordered by voxel, then landmark.

    Raises:
        NetworkFailed: A score is not a number, or softmax scores are infinite.
    """
    return begin_votes(field, threshold, stride=stride, origin=origin, importance=importance)()


def begin_votes(
    field: Field,
    threshold: float,
    *,
    stride: int = 1,
    origin: Sequence[int] = (0, 0, 0),
    importance: Profiles | None = None,
) -> Callable[[], Votes]:
    """Begin to do the same; a device that works by itself is given its work, and not waited for.

    Returns:
        A function that waits for the votes and returns them; it raises as ``filter_votes``, which
        on other devices this one does.
    """
    if has_triton(field.scores.device):
        return begin_votes_by_kernel(
            field, threshold, stride=stride, origin=origin, importance=importance
        )
    if field.scores.device.type == "cpu":
        landmark, columns = collect_votes(field, threshold, stride, origin, importance)
        votes = _votes_of(torch.from_numpy(landmark), torch.from_numpy(columns))
    else:
        votes = filter_votes_plainly(
            field, threshold, stride=stride, origin=origin, importance=importance
        )
    return lambda: votes


def begin_votes_by_kernel(
    field: Field,
    threshold: float,
    *,
    stride: int = 1,
    origin: Sequence[int] = (0, 0, 0),
    importance: Profiles | None = None,
) -> Callable[[], Votes]:
    """Do the same by kernels for CUDA, where Triton is installed."""
    from app.voting.cuda import votes as votes_triton  # noqa: PLC0415 - Triton is not there for every platform

    columns = votes_triton.begin_votes(field, threshold, stride, origin, importance)
    return lambda: _votes_of(*columns())


def filter_votes_plainly(
    field: Field,
    threshold: float,
    *,
    stride: int = 1,
    origin: Sequence[int] = (0, 0, 0),
    importance: Profiles | None = None,
) -> Votes:
    """Do as ``filter_votes`` by torch alone: what kernels are held to, and where there is none."""
    found = collect(field, threshold)
    _, depth, height, width = field.scores.shape
    i = torch.arange(depth, device=found.row.device).repeat_interleave(height)
    j = torch.arange(height, device=found.row.device).repeat(depth)
    places = ((i, found.row), (j, found.row), (torch.arange(width, device=i.device), found.k))
    step = field.offsets.stride()
    line = _memory_of(field.offsets)
    start = (i * step[2] + j * step[3]).index_select(0, found.row)
    start += found.k * step[4] + found.landmark * step[1]
    columns = torch.empty(8, len(start), device=start.device)
    source, position = columns[:3], columns[3:6]
    columns[6] = columns[7] = found.probability
    for axis, (index, which) in enumerate(places):
        centre = index.float() * stride + (origin[axis] + 0.5 * stride - 0.5)
        source[axis] = centre.index_select(0, which)
        offset = line.index_select(0, start + axis * step[0]).float()
        position[axis] = source[axis] + offset * field.offset_scale[axis]
        if importance is not None:
            columns[7] *= importance[axis].index_select(0, index).index_select(0, which)
    votes = _votes_of(found.landmark, columns)
    # One pass instead of four: a sum is finite only if all terms are.
    return votes if math.isfinite(float(position.sum())) else _finite(votes)


def _votes_of(landmark: Int64[Tensor, " votes"], columns: Float[Tensor, "8 votes"]) -> Votes:
    """View rows of numbers as votes; an axis of all votes lies together in memory."""
    return Votes(landmark, columns[:3].T, columns[3:6].T, columns[6], columns[7])


def _memory_of(
    offsets: Float[Tensor, "3 landmarks i j k"],
) -> Float[Tensor, " elements"]:
    """View the memory of the offsets as one line: one index is gathered faster than four."""
    sizes = zip(offsets.stride(), offsets.shape, strict=True)
    return offsets.as_strided((1 + sum(step * (size - 1) for step, size in sizes),), (1,))


def _finite(votes: Votes) -> Votes:
    """Drop the votes for no place."""
    return select_votes(votes, true_indices(votes.position.isfinite().all(1)))


def concat_votes(parts: Sequence[Votes]) -> Votes:
    """Join the votes of several tiles, in the order given; nothing gives no votes, on the CPU."""
    if not parts:
        return empty_votes(torch.device("cpu"))
    return Votes(
        landmark=torch.cat([part.landmark for part in parts]),
        source=torch.cat([part.source for part in parts]),
        position=torch.cat([part.position for part in parts]),
        probability=torch.cat([part.probability for part in parts]),
        weight=torch.cat([part.weight for part in parts]),
    )


def select_votes(votes: Votes, rows: Bool[Tensor, " votes"] | Int64[Tensor, " rows"]) -> Votes:
    """Take some of the votes, by a mask or by row numbers."""
    return Votes(
        landmark=votes.landmark[rows],
        source=votes.source[rows],
        position=votes.position[rows],
        probability=votes.probability[rows],
        weight=votes.weight[rows],
    )


def empty_votes(device: torch.device) -> Votes:
    """Make no votes at all, on a device."""
    none = torch.zeros(0, device=device)
    points = torch.zeros(0, 3, device=device)
    return Votes(none.long(), points, points, none, none)


def filter_rows(
    field: Field,
    threshold: float,
    sample_shape: Sequence[int],
    *,
    origin: Sequence[int] = (0, 0, 0),
) -> Rows:
    """List the votes of a field as rows ``landmark, probability, i, j, k``: the known case P1.

    Args:
        field: Scores and offsets of one array, or of a part of it.
        threshold: Least probability of a vote, compared in float32.
        sample_shape: Part of the array that counts; a position p is kept if 0 <= p < sample_shape
            on every axis.
        origin: Index in the array of the field's first voxel.

    Returns:
        One row per vote kept, ordered by voxel (i, then j, then k), then by landmark.

    Raises:
        NetworkFailed: A score is not a number, or softmax scores are infinite.
    """
    if field.scores.device.type == "cpu":
        return torch.from_numpy(collect_rows(field, threshold, sample_shape, origin))
    return rows_of(filter_votes(field, threshold, origin=origin), sample_shape)


def rows_of(votes: Votes, sample_shape: Sequence[int]) -> Rows:
    """Do as ``filter_rows`` by torch alone, from votes of the array."""
    end = torch.tensor(sample_shape, device=votes.position.device)
    kept = ((votes.position >= 0) & (votes.position < end)).all(1)
    columns = (votes.landmark[kept, None], votes.probability[kept, None], votes.position[kept])
    return torch.cat([column.float() for column in columns], dim=1)
