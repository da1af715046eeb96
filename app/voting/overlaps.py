"""Heatmaps of tiles that overlap -> votes of their mean: one for a voxel and a landmark.

Heatmaps are averaged as the network answers them, before their activation, as nnU-Net and MONAI do.

A softmax over channels needs the mean of all of them, so all are held (``DenseMean``). Otherwise
landmarks know nothing of each other, and only votes are held (``SparseMean``): a mean takes a
vote's memory, however many tiles it is of. A voxel may pass in one tile and not in another, so
tiles are filtered by a lower threshold, and what is below that in some tile counts there as much as
the lower threshold itself. Sums of votes are of whole numbers, so the order of tiles changes no bit
of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from app.model import Field, Manifest
from app.voting.reference import Placement
from app.voting.votes import Votes, concat_votes, filter_votes

LOWER: Final = 0.25
"""Of the threshold. With networks whose tiles disagree by a third of a voxel, no landmark was more
than 0.005 voxel from where dense heatmaps have it; with a half, 0.012."""

FIXED_ONE: Final = 1 << 40
"""Fixed-point units of a vote of importance 1; logits are below 17, and tiles of a voxel few."""

LEAST: Final = 1 << 10
"""Units of importance that count at all: what is seen so far from a tile's centre says nothing."""

SURE: Final = 1 - 2**-24
"""Probabilities that float32 cannot tell from 1 have a logit, too."""


@dataclass(frozen=True, slots=True)
class SparseMean:
    """How votes of tiles that overlap are averaged.

    Attributes:
        threshold: Least probability of a voxel of the mean.
        logits: Whether the mean is of logits, or of the values themselves.
        stride: Grid voxels per field voxel.
    """

    threshold: float
    logits: bool
    stride: int

    @property
    def lower_threshold(self) -> float:
        """Least probability of a voxel of a tile."""
        return LOWER * self.threshold

    def merge(self, parts: Sequence[Votes]) -> Votes:
        """Average votes of some tiles, or of means of some; more may be merged with the mean."""
        votes = concat_votes(parts)
        if not len(votes):
            return votes
        importance = votes.weight / votes.probability
        sums = torch.stack([importance, importance * self._value(votes.probability)])
        group, first = self._group(votes)
        total = torch.zeros(2, len(first), dtype=torch.int64, device=sums.device)
        total.index_add_(1, group, (sums.double() * FIXED_ONE).round().long())
        counts = total[0] >= LEAST
        total, merged = total[:, counts], votes.select(first[counts])
        self._set(merged, total[0] / FIXED_ONE, total[1] / total[0])
        return merged

    def finish(self, votes: Votes) -> Votes:
        """Turn the mean of the tiles that have votes into that of all, and drop what is too low.

        Args:
            votes: Merged from all tiles of a scan, whose importance at any voxel sums to 1.
        """
        importance = (votes.weight / votes.probability).clamp(max=1.0)
        lowest = self._value(votes.probability.new_tensor(self.lower_threshold))
        mean = importance * self._value(votes.probability) + (1 - importance) * lowest
        self._set(votes, torch.ones_like(importance), mean)
        return votes.select(votes.probability >= self.threshold)

    def _value(self, probability: Tensor) -> Tensor:
        """Return what is averaged."""
        return probability.clamp(max=SURE).logit() if self.logits else probability

    def _set(self, votes: Votes, importance: Tensor, mean: Tensor) -> None:
        """Set probabilities and weights."""
        votes.columns[6] = mean.sigmoid() if self.logits else mean
        votes.columns[7] = votes.columns[6] * importance

    def _group(self, votes: Votes) -> tuple[Tensor, Tensor]:
        """Number the voxels and landmarks that vote; return each vote's number, and one of each."""
        voxel = ((votes.columns[:3] + 0.5) / self.stride - 0.5).round().long()
        sizes = [int(size) for size in voxel.amax(1) + 1]
        landmarks = int(votes.landmark.max()) + 1
        key = (voxel[0] * sizes[1] + voxel[1]) * sizes[2] + voxel[2]
        _, group = torch.unique(key * landmarks + votes.landmark, return_inverse=True)
        first = torch.empty(int(group.max()) + 1, dtype=torch.int64, device=group.device)
        first[group] = torch.arange(len(group), device=group.device)
        return group, first


@dataclass(frozen=True, slots=True)
class WeightedTile:
    """What a tile adds to the mean of a scan.

    Attributes:
        target: The part of the mean where the tile lies.
        scores: Of the tile, times its importance.
    """

    target: Float[Tensor, "channels i j k"]
    scores: Float[Tensor, "channels i j k"]

    def add(self) -> None:
        """Add the tile, which takes no memory and cannot fail."""
        self.target.add_(self.scores)


class DenseMean:
    """Mean scores of all channels at every voxel of a grid."""

    def __init__(self, grid_shape: Sequence[int], threshold: float, stride: int) -> None:
        """Hold nothing yet.

        Args:
            grid_shape: Shape of the grid in voxels.
            threshold: Least probability of a vote.
            stride: Grid voxels per field voxel.
        """
        self._shape = [-(-size // stride) for size in grid_shape]
        self._threshold = threshold
        self._stride = stride
        self.scores: Float[Tensor, "channels i j k"] | None = None

    def weigh(self, field: Field, placement: Placement) -> WeightedTile:
        """Weigh a tile, all of which lies in the grid; importances at a voxel sum to 1."""
        if self.scores is None:
            shape = (len(field.scores), *self._shape)
            self.scores = torch.zeros(shape, device=field.scores.device)
        target = self.scores
        for axis, first in enumerate(placement.origin, start=1):
            target = target.narrow(axis, first // self._stride, field.scores.shape[axis])
        scores = field.scores.float()
        if placement.importance is not None:
            along_i, along_j, along_k = placement.importance
            scores = scores * (along_i[:, None, None] * along_j[:, None] * along_k)
        return WeightedTile(target, scores)

    def votes(self) -> Votes:
        """Collect the votes of the mean, once all tiles are added.

        Raises:
            NetworkFailed: A score is not a number.
        """
        if self.scores is None:
            return concat_votes([])
        offsets = self.scores.new_zeros(1).expand(3, len(self.scores) - 1, *self._shape)
        field = Field(self.scores, offsets, "softmax", background=True)
        return filter_votes(field, self._threshold, Placement(stride=self._stride))


def mean_of(
    manifest: Manifest, grid_shape: Sequence[int], tiles: int
) -> SparseMean | DenseMean | None:
    """Say how a scan's tiles are averaged; None: their votes add up as they are."""
    network, threshold = manifest.network, manifest.voting.threshold
    if tiles == 1 or network.output != "heatmaps":
        return None
    if network.activation == "softmax":
        return DenseMean(grid_shape, threshold, network.output_stride)
    return SparseMean(threshold, network.activation == "sigmoid", network.output_stride)
