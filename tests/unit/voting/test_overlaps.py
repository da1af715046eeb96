"""Votes of tiles that overlap become those of the mean of their heatmaps."""

from collections.abc import Sequence

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from app.model import Field
from app.voting.overlaps import DenseMean, SparseMean
from app.voting.reference import Placement
from app.voting.votes import Votes, filter_votes
from tests.support.synthetic import shuffled

SHAPE = (20, 12, 10)
TILE = 12
STARTS = (0, 4, 8)
THRESHOLD = 0.2


def profiles() -> Float[Tensor, "tiles i"]:
    """Make the importance of tiles along the first axis: it sums to 1."""
    raw = torch.zeros(len(STARTS), SHAPE[0])
    for tile, start in enumerate(STARTS):
        raw[tile, start : start + TILE] = torch.rand(TILE) + 0.05
    return raw / raw.sum(0)


def case(overlap: SparseMean) -> tuple[list[Votes], Float[Tensor, "2 i j k"]]:
    """Make the votes of tiles that disagree, and the probabilities of their dense mean."""
    torch.manual_seed(3)
    weights, mean, parts = profiles(), torch.zeros(2, *SHAPE), []
    blob = 4 - 0.1 * (torch.arange(SHAPE[0]) - 9.3).square()[:, None, None].expand(SHAPE)
    for tile, start in enumerate(STARTS):
        end = start + TILE
        scores = torch.stack([blob, -blob])[:, start:end] + 0.1 * torch.randn(2, TILE, *SHAPE[1:])
        scores = scores if overlap.logits else scores.sigmoid()
        share = weights[tile, start:end]
        mean[:, start:end] += share[:, None, None] * scores
        field = Field(
            scores=scores,
            offsets=torch.zeros(1).expand(3, *scores.shape),
            activation="sigmoid" if overlap.logits else "none",
            background=False,
        )
        along = torch.ones(SHAPE[1]), torch.ones(SHAPE[2])
        stride = overlap.stride
        placement = Placement((start * stride, 0, 0), stride, (share, *along))
        parts.append(filter_votes(field, overlap.lower_threshold, placement))
    return parts, mean.sigmoid() if overlap.logits else mean


def by_voxel(votes: Votes, stride: int) -> Float[Tensor, "2 i j k"]:
    """Put the probabilities of votes where they come from."""
    dense = torch.zeros(2, *SHAPE)
    assert torch.equal(votes.source, votes.position)
    assert torch.equal(votes.probability, votes.weight)
    voxel = ((votes.source + 0.5) / stride - 0.5).long()
    dense[votes.landmark, *voxel.T] = votes.probability
    return dense


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("logits", [False, True])
def test_votes_are_those_of_the_dense_mean(stride: int, *, logits: bool) -> None:
    overlap = SparseMean(THRESHOLD, logits, stride)
    parts, mean = case(overlap)
    votes = overlap.finish(overlap.merge(parts))
    expected = torch.where(mean >= THRESHOLD, mean, 0.0)
    assert torch.allclose(by_voxel(votes, stride), expected, atol=1e-5)
    assert len(votes) == int((mean >= THRESHOLD).sum()) > 0


def read_softmax(scores: Tensor, shape: Sequence[int]) -> Field:
    """Read scores of two landmarks and a background."""
    offsets = torch.zeros(1).expand(3, 2, *shape)
    return Field(scores, offsets, "softmax", background=True)


@pytest.mark.parametrize("stride", [1, 2])
def test_softmax_is_that_of_the_mean_of_all_channels(stride: int) -> None:
    torch.manual_seed(4)
    weights, total, sums = profiles(), torch.zeros(3, *SHAPE), torch.zeros(SHAPE[0])
    shape, least = [stride * size - stride + 1 for size in SHAPE], 0.4
    mean = DenseMean(shape, THRESHOLD, stride, least, read_softmax)
    assert len(mean.votes()) == 0
    for tile, start in enumerate(STARTS):
        scores = torch.randn(3, TILE, *SHAPE[1:])
        share = weights[tile, start : start + TILE]
        counts = share.clamp(min=least)
        sums[start : start + TILE] += counts
        total[:, start : start + TILE] += counts[:, None, None] * scores
        field = read_softmax(scores, scores.shape[1:])
        along = torch.ones(SHAPE[1]), torch.ones(SHAPE[2])
        mean.weigh(field, Placement((start * stride, 0, 0), stride, (share, *along))).add()
    expected = (total / sums[:, None, None]).softmax(0)[1:]
    expected = torch.where(expected >= THRESHOLD, expected, 0.0)
    assert torch.allclose(by_voxel(mean.votes(), stride), expected, atol=1e-6)


def test_tiles_and_their_votes_may_be_merged_in_any_order_and_in_groups() -> None:
    overlap = SparseMean(THRESHOLD, logits=True, stride=1)
    parts, _ = case(overlap)
    once = overlap.finish(overlap.merge(parts))
    for order in ([2, 0, 1], [1, 2, 0]):
        again = overlap.finish(overlap.merge([shuffled(parts[index], index) for index in order]))
        assert torch.equal(once.landmark, again.landmark)
        assert torch.equal(once.columns, again.columns)
    grouped = overlap.finish(overlap.merge([overlap.merge(parts[:2]), parts[2]]))
    assert torch.allclose(by_voxel(grouped, 1), by_voxel(once, 1), atol=1e-5)


def test_a_mean_of_tiles_takes_the_memory_of_one_vote() -> None:
    overlap = SparseMean(THRESHOLD, logits=True, stride=1)
    parts, _ = case(overlap)
    merged = overlap.merge(parts)
    voxels = {
        (int(v), *s.tolist()) for p in parts for v, s in zip(p.landmark, p.source, strict=True)
    }
    assert len(merged) == len(voxels) < sum(map(len, parts))


def test_saturated_probabilities_and_no_votes_are_averaged() -> None:
    overlap = SparseMean(THRESHOLD, logits=True, stride=1)
    columns = torch.tensor([[1.0, 2.0, 3.0] * 2 + [1.0, 0.5]] * 2).T
    sure = overlap.finish(overlap.merge([Votes(torch.zeros(2, dtype=torch.int64), columns)]))
    assert sure.columns[6].tolist() == pytest.approx([1.0])
    none = overlap.merge([sure.select(sure.probability > 2)])
    assert len(overlap.finish(none)) == 0


@pytest.mark.parametrize("importance", [0.0, 1e-30, 1e-12])
def test_a_vote_of_next_to_no_importance_is_none(importance: float) -> None:
    overlap = SparseMean(THRESHOLD, logits=False, stride=1)
    columns = torch.tensor([[1.0, 2.0, 3.0] * 2 + [0.9, 0.9 * importance]]).T
    merged = overlap.merge([Votes(torch.zeros(1, dtype=torch.int64), columns)])
    assert len(overlap.finish(overlap.merge([merged]))) == 0
