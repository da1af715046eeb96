"""Votes -> Ballots: the votes on the host, as they are counted."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

from app.heatmaps import FIXED_ONE
from app.votes import Votes


@dataclass(frozen=True, slots=True)
class Ballots:
    """Votes on the host, one column each.

    Attributes:
        landmark: Which landmark the vote is for.
        position: Where it says the landmark is, in grid voxels.
        source: Centre of the voxel that casts it, in grid voxels.
        weight: What it counts, in whole fixed-point units.
    """

    landmark: Int64[np.ndarray, " votes"]
    position: Float32[np.ndarray, "3 votes"]
    source: Float32[np.ndarray, "3 votes"]
    weight: Float64[np.ndarray, " votes"]


def collect_ballots(votes: Votes) -> Ballots:
    """Bring votes to the host; on a CPU nothing but the weights is copied."""
    weight = votes.weight.cpu().numpy()
    return Ballots(
        landmark=votes.landmark.cpu().numpy(),
        position=votes.position.T.cpu().numpy(),
        source=votes.source.T.cpu().numpy(),
        # Exact in float32: a product with a power of two, then a whole number below 2^24.
        weight=np.rint(weight * np.float32(FIXED_ONE)).astype(np.float64),
    )
