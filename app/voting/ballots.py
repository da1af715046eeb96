"""Votes -> Ballots: the votes on the host, landmark by landmark, as they are counted."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

from app.voting.cpu.ballots import count_votes, group_votes
from app.voting.heatmaps import FIXED_ONE
from app.voting.votes import Votes


@dataclass(frozen=True, slots=True)
class Ballots:
    """Votes on the host, one column each, those of a landmark side by side.

    Attributes:
        starts: Where the votes of each landmark begin, and where the last one's end.
        position: Where a vote says the landmark is, in grid voxels.
        source: Centre of the voxel that casts it, in grid voxels.
        weight: What it counts, in whole fixed-point units.
    """

    starts: Int64[np.ndarray, " bounds"]
    position: Float32[np.ndarray, "3 votes"]
    source: Float32[np.ndarray, "3 votes"]
    weight: Float64[np.ndarray, " votes"]


def collect_ballots(votes: Votes, landmarks: int) -> Ballots:
    """Bring votes to the host and put those of each landmark together."""
    landmark = votes.landmark.cpu().numpy()
    position, source = votes.position.T.cpu().numpy(), votes.source.T.cpu().numpy()
    starts = np.zeros(landmarks + 1, dtype=np.int64)
    count_votes(landmark, starts)
    columns = np.empty((6, len(landmark)), dtype=np.float32)
    weight = np.empty(len(landmark), dtype=np.float64)
    group_votes(
        landmark,
        position,
        source,
        votes.weight.cpu().numpy(),
        np.float32(FIXED_ONE),
        starts,
        columns,
        weight,
    )
    return Ballots(starts, columns[:3], columns[3:], weight)
