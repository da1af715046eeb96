"""Votes -> fixed-point sums on CUDA: the twin of ``app.voting.heatmaps.count_votes``.

Every vote is one atomic addition of an integer; no rows are picked or copied before.
Integers commute, so the sums have the same bits as those of the torch code, in whatever order the
device comes to add them. Functions that are compiled have no annotations: their types are those
they are called with.
"""

from typing import Final, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int64
from torch import Tensor

from app.voting.votes import Votes

BLOCK: Final = 256
"""Votes per program."""

WHOLE: Final = tl.constexpr(float(1 << 23))
"""From here on every float32 is a whole number."""

ROUNDER: Final = tl.constexpr(float(3 << 51))
"""Added to a float64 and taken away again, it leaves the nearest whole number, the even of two."""


def count_votes(
    votes: Votes,
    which: Int64[Tensor, " votes"],
    counters: Int64[Tensor, "heatmaps i j k"],
    one: int,
) -> None:
    """Add every vote's weight to the voxel nearest to its position, in place.

    Args:
        votes: The votes.
        which: The heatmap of each vote; votes for one that is not there are left out.
        counters: Fixed-point sums; votes outside of them are left out.
        one: Fixed-point units per 1.0, a power of two.
    """
    if len(votes) == 0:
        return
    with torch.cuda.device_of(counters):
        add_votes[(triton.cdiv(len(votes), BLOCK),)](
            votes.position,
            votes.position.stride(),
            (votes.weight, votes.weight.stride(0)),
            (which, which.stride(0)),
            counters.view(-1),
            tuple(counters.shape),
            len(votes),
            one=float(one),
            block=BLOCK,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize=["count"])
@no_type_check
def add_votes(
    position,
    steps,
    weights,
    heatmaps,
    counters,
    shape,
    count,
    one: tl.constexpr,
    block: tl.constexpr,
):
    """Add a block of votes."""
    vote = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    heatmap = tl.load(heatmaps[0] + vote * heatmaps[1], mask=vote < count, other=-1)
    inside = (heatmap >= 0) & (heatmap < shape[0])
    index = heatmap
    for axis in tl.static_range(3):
        place = tl.load(position + vote * steps[0] + axis * steps[1], mask=inside, other=0.0)
        # float64, because 0.49999997 + 0.5 is 1 in float32.
        nearest = tl.floor(place.to(tl.float64) + 0.5)
        inside &= (nearest >= 0.0) & (nearest < shape[1 + axis])
        index = index * shape[1 + axis] + tl.where(inside, nearest, 0.0).to(tl.int64)
    units = tl.load(weights[0] + vote * weights[1], mask=inside, other=0.0) * one
    exact = units.to(tl.float64)
    rounded = tl.where(tl.abs(units) < WHOLE, (exact + ROUNDER) - ROUNDER, exact)
    tl.atomic_add(counters + index, rounded.to(tl.int64), mask=inside, sem="relaxed")
