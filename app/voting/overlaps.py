"""Heatmaps of tiles that overlap -> votes of their mean: one for a voxel and a landmark.

Heatmaps are averaged as the network answers them, before their activation, as nnU-Net and MONAI do.

A softmax over channels needs the mean of all of them, so all are held (``DenseMean``). So they are
with the layout of MONAI, whose importances are no products of profiles. Otherwise landmarks know
nothing of each other, and only votes are held (``SparseMean``): a mean takes a vote's memory,
however many tiles it is of. A voxel may pass in one tile and not in another, so tiles are filtered
by a lower threshold, and what is below that in some tile counts there as much as the lower
threshold itself. Sums of votes are of whole numbers, so that the order in which tiles are merged
together changes no bit of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from app.model import Field, Manifest, make_output
from app.voting.reference import Placement
from app.voting.votes import Votes, concat_votes, filter_votes

LOWER: Final = 0.25
"""Of the threshold. With networks whose tiles disagree by a third of a voxel, no landmark was more
than 0.005 voxel from where dense heatmaps have it; with a half, 0.012."""

FIXED_ONE: Final = 1 << 40
"""Fixed-point units of a vote of importance 1; logits are below 17, and tiles of a voxel few."""

LEAST: Final = 1 << 10
"""Units of importance that count at all: what is seen so far from a tile's centre says nothing."""

MONAI_LEAST: Final = 1e-3
"""Importance of a voxel in MONAI, at least; the most is 1."""

Read: TypeAlias = Callable[[Tensor, Sequence[int]], Field]

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
        target: The part of the sums where the tile lies.
        scores: Of the tile, times its importance; and at last the importance.
    """

    target: Float[Tensor, "channels_and_importance i j k"]
    scores: Float[Tensor, "channels_and_importance i j k"]

    def add(self) -> None:
        """Add the tile, which takes no memory and cannot fail."""
        self.target.add_(self.scores)


class DenseMean:
    """Mean scores of all channels at every voxel of a grid."""

    def __init__(
        self, grid_shape: Sequence[int], threshold: float, stride: int, least: float, read: Read
    ) -> None:
        """Hold nothing yet.

        Args:
            grid_shape: Shape of the grid in voxels.
            threshold: Least probability of a vote.
            stride: Grid voxels per field voxel.
            least: Importance of a voxel of a tile, at least.
            read: How scores of a shape are read.
        """
        self._shape = [-(-size // stride) for size in grid_shape]
        self._threshold = threshold
        self._stride = stride
        self._least = least
        self._read = read
        self.sums: Float[Tensor, "channels_and_importance i j k"] | None = None

    def weigh(self, field: Field, placement: Placement) -> WeightedTile:
        """Weigh a tile, all of which lies in the grid."""
        scores = field.scores
        if self.sums is None:
            self.sums = torch.zeros(len(scores) + 1, *self._shape, device=scores.device)
        target = self.sums
        for axis, first in enumerate(placement.origin, start=1):
            target = target.narrow(axis, first // self._stride, scores.shape[axis])
        weighted = torch.ones_like(target)
        if placement.importance is not None:
            i, j, k = placement.importance
            weighted *= (i[:, None, None] * j[:, None] * k).clamp_(min=self._least)
        weighted[:-1] *= scores
        return WeightedTile(target, weighted)

    def votes(self) -> Votes:
        """Collect the votes of the mean, once: it takes the place of the sums.

        Raises:
            NetworkFailed: A score is not a number.
        """
        if self.sums is None:
            return concat_votes([])
        mean = self.sums[:-1].div_(self.sums[-1])
        field = self._read(mean, self._shape)
        return filter_votes(field, self._threshold, Placement(stride=self._stride))


def mean_of(
    manifest: Manifest, grid_shape: Sequence[int], tiles: int
) -> SparseMean | DenseMean | None:
    """Say how a scan's tiles are averaged; None: their votes add up as they are."""
    network, threshold = manifest.network, manifest.voting.threshold
    if tiles == 1 or network.output != "heatmaps":
        return None
    as_monai = manifest.input.tile_layout == "monai"
    if as_monai or network.activation == "softmax":
        least, read = MONAI_LEAST if as_monai else 0.0, make_output(manifest).field
        return DenseMean(grid_shape, threshold, network.output_stride, least, read)
    return SparseMean(threshold, network.activation == "sigmoid", network.output_stride)
