"""Field -> Votes: keep what passes the threshold, and nothing else."""

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor


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
