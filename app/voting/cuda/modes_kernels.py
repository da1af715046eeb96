"""votes -> fixed-point sums of cells and modes: the kernels of ``app.voting.cuda.modes``.

Their sums are those of ``app.voting.cpu.modes``, in every bit: each term is computed in float64 and
rounded to a whole number before it is added. Functions that are compiled have no annotations: their
types are those they are called with.
"""

from typing import Final, no_type_check

import triton
import triton.language as tl

ROUNDER: Final = tl.constexpr(float(3 << 51))
"""Added to a float64 and taken away again, it leaves the nearest whole number, the even of two."""


@triton.jit(do_not_specialize=["count"])
@no_type_check
def add_to_cells(votes, cells, table, count, block: tl.constexpr):
    """Add the weights of a block of votes to the cells they are in."""
    landmark, position, steps, _, _, weight = votes
    edges, shape, first = cells
    vote = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = vote < count
    number = tl.load(landmark + vote, mask=inside, other=0)
    for axis in tl.static_range(3):
        place = tl.load(position + vote * steps[0] + axis * steps[1], mask=inside, other=0.0)
        place = tl.floor((place.to(tl.float64) - first[axis] + 0.5) / edges[axis])
        inside &= (place >= 1.0) & (place < shape[axis] - 1)
        number = number * shape[axis] + tl.where(inside, place, 0.0).to(tl.int64)
    terms = tl.load(weight + vote, mask=inside, other=0)
    tl.atomic_add(table + number, terms, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
@no_type_check
def add_to_modes(
    votes,
    centres,
    units,
    reach,
    sums,
    count,
    modes: tl.constexpr,
    all_terms: tl.constexpr,
    block: tl.constexpr,
):
    """Add what a block of votes says of the modes within reach of each.

    Votes of one landmark are added up before they are added to its sums: they come from voxels side
    by side, so that a block has votes of few.
    """
    vote = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = vote < count
    landmark = tl.load(votes[0] + vote, mask=inside, other=-1)
    weight = tl.load(votes[5] + vote, mask=inside, other=0).to(tl.float64)
    last = tl.max(landmark, 0)
    mine = tl.maximum(tl.min(tl.where(inside, landmark, last), 0), 0)
    width: tl.constexpr = 10 if all_terms else 4
    while mine <= last:
        for mode in range(modes):
            row = mine * modes + mode
            away = (
                _away(votes[1], votes[2], vote, inside, centres, units, row, 0),
                _away(votes[1], votes[2], vote, inside, centres, units, row, 1),
                _away(votes[1], votes[2], vote, inside, centres, units, row, 2),
            )
            square = away[0] * away[0] + away[1] * away[1] + away[2] * away[2]
            near = inside & (landmark == mine) & (square <= tl.load(reach) * tl.load(reach))
            total = sums + row * width
            if tl.max(near.to(tl.int32), 0) > 0:
                _add(total, weight, near)
                for axis in tl.static_range(3):
                    if all_terms:
                        place = _away(votes[3], votes[4], vote, inside, centres, units, row, axis)
                        _add(total + 1 + axis, weight * place, near)
                    else:
                        _add(total + 1 + axis, weight * away[axis], near)
                if all_terms:
                    _add(total + 4, weight * away[0] * away[0], near)
                    _add(total + 5, weight * away[0] * away[1], near)
                    _add(total + 6, weight * away[0] * away[2], near)
                    _add(total + 7, weight * away[1] * away[1], near)
                    _add(total + 8, weight * away[1] * away[2], near)
                    _add(total + 9, weight * away[2] * away[2], near)
        mine += 1


@triton.jit
@no_type_check
def _away(places, steps, vote, inside, centres, units, row, axis: tl.constexpr):
    """Say how far places are from a mode along an axis, in reaches."""
    place = tl.load(places + vote * steps[0] + axis * steps[1], mask=inside, other=0.0)
    return place.to(tl.float64) * tl.load(units + axis) - tl.load(centres + row * 3 + axis)


@triton.jit
@no_type_check
def _add(target, terms, near):
    """Add the near ones of some terms, each as a whole number."""
    terms = tl.where(near, (terms + ROUNDER) - ROUNDER, 0.0).to(tl.int64)
    tl.atomic_add(target, tl.sum(terms, 0), sem="relaxed")
