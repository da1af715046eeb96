"""Field -> Votes: where the voxels that pass the threshold say that the landmarks are.

    vote = centre of the voxel + offset * offset_scale      if probability >= threshold

Offsets are read only where the probability passes. Votes come ordered by voxel (i, then j, then k),
then by landmark, whatever the memory layout; nothing downstream depends on the order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from app.compute import has_triton
from app.model import Field
from app.voting.cpu import votes as cpu_votes
from app.voting.reference import Importance, find_hits, true_indices

Rows = Float[Tensor, "rows 5"]
"""Votes as rows: landmark, probability, and position i, j, k in voxels."""


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes of one or more tiles, on their device; positions in grid voxels (i j k).

    Attributes:
        landmark: The landmark voted for.
        source: Centre of the field voxel that votes.
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
    importance: Importance | None = None,
) -> Votes:
    """Collect the votes of a field: every voxel and landmark that reaches the threshold.

    Field voxel u has its centre at grid index ``origin + (u + 0.5) * stride - 0.5``. A vote whose
    position is not finite is dropped; one outside the grid is kept.

    Args:
        field: Scores and offsets of one tile, or of one array.
        threshold: Least probability of a vote, compared in float32.
        stride: Grid voxels per field voxel.
        origin: Grid index of the tile's first voxel.
        importance: How much a field voxel counts, as one profile per axis; None: 1 everywhere.

    Returns:
        The votes, ordered by voxel, then landmark.

    Raises:
        NetworkFailed: A score is not a number, or softmax scores are infinite.
    """
    return launch_filter(field, threshold, stride=stride, origin=origin, importance=importance)()


def launch_filter(
    field: Field,
    threshold: float,
    *,
    stride: int = 1,
    origin: Sequence[int] = (0, 0, 0),
    importance: Importance | None = None,
) -> Callable[[], Votes]:
    """Do as ``filter_votes``, but on CUDA only enqueue the work.

    Returns:
        A function that waits for the votes and returns them; on CUDA it is the one that raises.
    """
    if has_triton(field.scores.device):
        return launch_filter_by_triton(
            field, threshold, stride=stride, origin=origin, importance=importance
        )
    if field.scores.device.type == "cpu":
        landmark, columns = cpu_votes.filter_votes(field, threshold, stride, origin, importance)
        votes = _votes_of(torch.from_numpy(landmark), torch.from_numpy(columns))
    else:
        votes = filter_votes_by_torch(
            field, threshold, stride=stride, origin=origin, importance=importance
        )
    return lambda: votes


def launch_filter_by_triton(
    field: Field,
    threshold: float,
    *,
    stride: int = 1,
    origin: Sequence[int] = (0, 0, 0),
    importance: Importance | None = None,
) -> Callable[[], Votes]:
    """Do as ``launch_filter`` by kernels for CUDA, where Triton is installed."""
    from app.voting.cuda import votes as cuda_votes  # noqa: PLC0415 - Triton is not there for every platform

    columns = cuda_votes.launch_filter(field, threshold, stride, origin, importance)
    return lambda: _votes_of(*columns())


def filter_votes_by_torch(
    field: Field,
    threshold: float,
    *,
    stride: int = 1,
    origin: Sequence[int] = (0, 0, 0),
    importance: Importance | None = None,
) -> Votes:
    """Do as ``filter_votes`` in plain torch, on any device: the reference for compiled code."""
    hits = find_hits(field, threshold)
    _, depth, height, width = field.scores.shape
    device = hits.row.device
    i = torch.arange(depth, device=device).repeat_interleave(height)
    j = torch.arange(height, device=device).repeat(depth)
    axes = ((i, hits.row), (j, hits.row), (torch.arange(width, device=device), hits.k))
    step = field.offsets.stride()
    flat = _flat(field.offsets)
    start = (i * step[2] + j * step[3]).index_select(0, hits.row)
    start += hits.k * step[4] + hits.landmark * step[1]
    columns = torch.empty(8, len(start), device=start.device)
    source, position = columns[:3], columns[3:6]
    columns[6] = columns[7] = hits.probability
    for axis, (index, which) in enumerate(axes):
        centre = index.float() * stride + (origin[axis] + 0.5 * stride - 0.5)
        source[axis] = centre.index_select(0, which)
        offset = flat.index_select(0, start + axis * step[0]).float()
        position[axis] = source[axis] + offset * field.offset_scale[axis]
        if importance is not None:
            columns[7] *= importance[axis].index_select(0, index).index_select(0, which)
    votes = _votes_of(hits.landmark, columns)
    # One pass instead of four: a sum is finite only if all terms are.
    if math.isfinite(float(position.sum())):
        return votes
    return select_votes(votes, true_indices(votes.position.isfinite().all(1)))


def _votes_of(landmark: Int64[Tensor, " votes"], columns: Float[Tensor, "8 votes"]) -> Votes:
    """View source, position, probability and weight as votes; each axis is contiguous in memory."""
    return Votes(landmark, columns[:3].T, columns[3:6].T, columns[6], columns[7])


def _flat(offsets: Float[Tensor, "3 landmarks i j k"]) -> Float[Tensor, " elements"]:
    """View the memory of the offsets as one axis: one index is gathered faster than four."""
    sizes = zip(offsets.stride(), offsets.shape, strict=True)
    return offsets.as_strided((1 + sum(step * (size - 1) for step, size in sizes),), (1,))


def concat_votes(parts: Sequence[Votes]) -> Votes:
    """Concatenate the votes of several tiles, in their order; of none, on the CPU."""
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
    """Select some of the votes, by a mask or by indices."""
    return Votes(
        landmark=votes.landmark[rows],
        source=votes.source[rows],
        position=votes.position[rows],
        probability=votes.probability[rows],
        weight=votes.weight[rows],
    )


def empty_votes(device: torch.device) -> Votes:
    """Make votes of length 0 on a device."""
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
    """List the votes of a field as rows ``landmark, probability, i, j, k``.

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
        return torch.from_numpy(cpu_votes.filter_rows(field, threshold, sample_shape, origin))
    return rows_by_torch(filter_votes(field, threshold, origin=origin), sample_shape)


def rows_by_torch(votes: Votes, sample_shape: Sequence[int]) -> Rows:
    """List the votes of an array as ``filter_rows`` does, in plain torch."""
    end = torch.tensor(sample_shape, device=votes.position.device)
    kept = ((votes.position >= 0) & (votes.position < end)).all(1)
    columns = (votes.landmark[kept, None], votes.probability[kept, None], votes.position[kept])
    return torch.cat([column.float() for column in columns], dim=1)
