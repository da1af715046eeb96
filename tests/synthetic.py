"""Made-up fields and votes with known answers, for the tests of the voting stages."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from app.network import Field
from app.votes import Votes


def random_field(
    shape: Sequence[int], landmarks: int, activation: str = "softmax", seed: int = 0
) -> Field:
    """Make a field of noise: about a fifth of voxels and landmarks pass a threshold of 0.3."""
    random = torch.Generator().manual_seed(seed)
    channels = landmarks + (activation == "softmax")
    scores = 2 * torch.randn(channels, *shape, generator=random) - 1
    if activation == "none":
        scores = torch.rand(channels, *shape, generator=random)
    offsets = 4 * torch.randn(3, landmarks, *shape, generator=random)
    return Field(scores, offsets, activation, activation == "softmax")  # type: ignore[arg-type]


def ball_votes(
    centre: Sequence[float],
    shape: Sequence[int],
    radius: float,
    *,
    landmark: int = 0,
    noise: float = 1.0,
    probability: float = 0.8,
    seed: int = 0,
) -> Votes:
    """Let every voxel of a grid within a radius of a place vote for it, with noise, all in voxels."""
    random = np.random.default_rng(seed)
    voxels = np.stack(np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), axis=-1)
    source = voxels.reshape(-1, 3)
    source = source[np.linalg.norm(source - np.asarray(centre), axis=1) <= radius]
    position = np.asarray(centre) + noise * random.standard_normal(source.shape)
    return votes_at(position, landmark=landmark, probability=probability, source=source)


def votes_at(
    position: NDArray[np.float64] | Sequence[Sequence[float]],
    *,
    landmark: int | Sequence[int] = 0,
    probability: float | Sequence[float] = 1.0,
    source: NDArray[np.int64] | None = None,
) -> Votes:
    """Make votes for given positions."""
    places = torch.as_tensor(np.asarray(position), dtype=torch.float32).reshape(-1, 3)
    weight = torch.as_tensor(probability, dtype=torch.float32).expand(len(places)).clone()
    origin = places if source is None else torch.as_tensor(source, dtype=torch.float32)
    landmarks = torch.as_tensor(landmark, dtype=torch.int64).expand(len(places)).clone()
    return Votes(landmarks, origin, places, weight, weight)


def shuffled(votes: Votes, seed: int) -> Votes:
    """Put the votes into another order."""
    order = torch.randperm(len(votes), generator=torch.Generator().manual_seed(seed))
    return Votes(
        votes.landmark[order],
        votes.source[order],
        votes.position[order],
        votes.probability[order],
        votes.weight[order],
    )


def moved(votes: Votes, by: Float[Tensor, " 3"]) -> Votes:
    """Translate votes and the voxels that cast them."""
    return Votes(
        votes.landmark, votes.source + by, votes.position + by, votes.probability, votes.weight
    )
