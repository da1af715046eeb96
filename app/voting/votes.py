"""Field -> Votes: where the voxels that pass the threshold say that the landmarks are.

    vote = centre of the voxel + offset * offset_scale      if probability >= threshold

Offsets are read only where the probability passes. Votes come ordered by voxel (i, then j, then k),
then by landmark, whatever the memory layout; but as they were found where ``launch_filter`` does it
on CUDA. Nothing downstream depends on the order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from app.compute import has_triton
from app.errors import BadParameter
from app.model import Field
from app.voting import reference
from app.voting.cpu import votes as cpu_votes
from app.voting.readout import check_lengths
from app.voting.reference import Placement

Rows = Float[Tensor, "rows 5"]
"""Votes as rows: landmark, probability, and position i, j, k in voxels."""

WHOLE_GRID: Final = Placement()

MAX_PROBABILITY: Final = 2.0
"""To which values of heatmaps over their peak are cut: sums of weights stay small numbers."""


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes of one or more tiles, on their device; positions in grid voxels (i j k).

    Attributes:
        landmark: The landmark voted for.
        columns: What follows, each axis and number contiguous in memory.
    """

    landmark: Int64[Tensor, " votes"]
    columns: Float32[Tensor, "8 votes"]

    def __len__(self) -> int:
        return len(self.landmark)

    @property
    def source(self) -> Float32[Tensor, "votes 3"]:
        """Centre of the field voxel that votes."""
        return self.columns[:3].T

    @property
    def position(self) -> Float32[Tensor, "votes 3"]:
        """Where it says the landmark is; may lie outside the grid."""
        return self.columns[3:6].T

    @property
    def probability(self) -> Float32[Tensor, " votes"]:
        """Probability of the landmark at the source."""
        return self.columns[6]

    @property
    def weight(self) -> Float32[Tensor, " votes"]:
        """Probability times the tile's importance at the source."""
        return self.columns[7]

    def check(self, landmarks: int) -> None:
        """Check that there are votes for so many landmarks only; they are on the host.

        Raises:
            BadParameter: There are votes for others.
        """
        if (most := int(self.landmark.numpy().max(initial=-1)) + 1) > landmarks:
            raise BadParameter(
                f"expected votes for {landmarks} landmarks, as are read out, got some for {most}"
            )

    def select(self, rows: Bool[Tensor, " votes"] | Int64[Tensor, " rows"]) -> "Votes":
        """Select some of the votes, by a mask or by indices from 0."""
        # Torch's indexing in brackets takes longer, and several threads on the CPU.
        index = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        return Votes(self.landmark.index_select(0, index), self.columns.index_select(1, index))

    def cpu(self) -> "Votes":
        """Copy the votes to the host, if they are not there."""
        return Votes(self.landmark.cpu(), self.columns.cpu())


def filter_votes(field: Field, threshold: float, placement: Placement = WHOLE_GRID) -> Votes:
    """Collect the votes of a field: every voxel and landmark that reaches the threshold.

    A vote whose position is not finite is dropped; one outside the grid is kept.

    Args:
        field: Scores and offsets of one tile, or of one array, in any memory layout.
        threshold: Least probability of a vote, compared in float32.
        placement: Where the field lies in the grid.

    Returns:
        The votes, ordered by voxel, then landmark.

    Raises:
        BadParameter: The threshold is not from 0 to 1.
        NetworkFailed: A score is not a number, or the softmax of some is none.
    """
    _check_threshold(threshold)
    votes = launch_filter(field, threshold, placement)()
    return votes if field.scores.device.type == "cpu" else sort_votes(votes)


def launch_filter(
    field: Field, threshold: float, placement: Placement = WHOLE_GRID
) -> Callable[[], Votes]:
    """Do as ``filter_votes``, but on CUDA only enqueue the work.

    Returns:
        A function that waits for the votes and returns them: those of CUDA in any order, and there
        it is the one that raises.
    """
    if field.peak is not None:
        values = replace(field, peak=None)
        collect_values = launch_filter(values, threshold * field.peak, placement)
        return partial(_divide, collect_values, field.peak)
    device = field.scores.device
    if has_triton(device):
        from app.voting.cuda import votes as cuda_votes  # noqa: PLC0415 - Triton is not there for every platform

        collect = cuda_votes.launch_filter(field, threshold, placement)
        return lambda: Votes(*collect())
    filter_columns = (cpu_votes if device.type == "cpu" else reference).filter_columns
    votes = Votes(*filter_columns(field, threshold, placement))
    return lambda: votes


def _divide(collect: Callable[[], Votes], peak: float) -> Votes:
    """Turn values of heatmaps, as which votes are weighted, into probabilities."""
    votes = collect()
    probability, weight = votes.columns[6], votes.columns[7]
    bound = MAX_PROBABILITY * peak
    # The importance of a value stays as it was; that of an infinite one is not to be told.
    weight.mul_((bound / probability).clamp_(max=1.0)).nan_to_num_(nan=bound).div_(peak)
    probability.clamp_(max=bound).div_(peak)
    return votes


def sort_votes(votes: Votes) -> Votes:
    """Sort votes by voxel (i, then j, then k), then by landmark."""
    votes = votes.select(votes.landmark.argsort(stable=True))
    for axis in (2, 1, 0):
        votes = votes.select(votes.columns[axis].argsort(stable=True))
    return votes


def concat_votes(parts: Sequence[Votes]) -> Votes:
    """Concatenate the votes of several tiles, in their order; of none, on the CPU."""
    if not parts:
        return Votes(torch.zeros(0, dtype=torch.int64), torch.zeros(8, 0))
    columns = torch.cat([part.columns for part in parts], dim=1)
    return Votes(torch.cat([part.landmark for part in parts]), columns)


def filter_rows(
    field: Field,
    threshold: float,
    sample_shape: Sequence[int],
    placement: Placement = WHOLE_GRID,
) -> Rows:
    """List the votes of a field as rows ``landmark, probability, i, j, k``.

    Args:
        field: Scores and offsets of one array, or of a part of it.
        threshold: Least probability of a vote, compared in float32.
        sample_shape: Part of the array that counts; a position p is kept if 0 <= p < sample_shape
            on every axis.
        placement: Where the field lies in the array.

    Returns:
        One row per vote kept, ordered by voxel (i, then j, then k), then by landmark.

    Raises:
        BadParameter: The threshold is not from 0 to 1, or the sample's shape not three whole
            numbers from 1.
        NetworkFailed: A score is not a number, or the softmax of some is none.
    """
    _check_threshold(threshold)
    check_lengths("sample_shape", sample_shape)
    if field.scores.device.type == "cpu":
        return cpu_votes.filter_rows(field, threshold, sample_shape, placement)
    return list_rows(filter_votes(field, threshold, placement), sample_shape)


def _check_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:  # Written so that NaN fails, which no probability reaches.
        raise BadParameter(f"threshold: expected a probability from 0 to 1, got {threshold!r}")


def list_rows(votes: Votes, sample_shape: Sequence[int]) -> Rows:
    """List the votes of an array as ``filter_rows`` does."""
    end = votes.columns.new_tensor(sample_shape)
    kept = votes.select(((votes.position >= 0) & (votes.position < end)).all(1))
    return torch.cat([kept.landmark[None].float(), kept.columns[6:7], kept.columns[3:6]]).T
