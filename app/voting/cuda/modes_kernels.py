"""The kernels of ``app.voting.cuda.modes``: votes -> fixed-point sums of cells and modes.

Their sums equal those of ``app.voting.cpu.modes`` bit by bit: each term is computed in float64 and
rounded to a whole number before it is added.
"""

from typing import Final, no_type_check

import triton
import triton.language as tl

ROUNDER: Final = tl.constexpr(float(3 << 51))
"""Added to a float64 and taken d again, it leaves the nearest whole number, the even of
two."""


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
        point = tl.load(position + vote * steps[0] + axis * steps[1], mask=inside, other=0.0)
        point = tl.floor((point.to(tl.float64) - first[axis] + 0.5) / edges[axis])
        inside &= (point >= 1.0) & (point < shape[axis] - 1)
        number = number * shape[axis] + tl.where(inside, point, 0.0).to(tl.int64)
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
    """Add the terms of a block of votes to the modes within reach of each.

    Votes of one landmark are reduced before they are added to its sums: they come from voxels side
    by side, so that a block has votes of few landmarks.
    """
    vote = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = vote < count
    landmark = tl.load(votes[0] + vote, mask=inside, other=-1)
    weight = tl.load(votes[5] + vote, mask=inside, other=0).to(tl.float64)
    last = tl.max(landmark, 0)
    current = tl.maximum(tl.min(tl.where(inside, landmark, last), 0), 0)
    width: tl.constexpr = 10 if all_terms else 4
    while current <= last:
        for mode in range(modes):
            row = current * modes + mode
            d = (
                _delta(votes[1], votes[2], vote, inside, centres, units, row, 0),
                _delta(votes[1], votes[2], vote, inside, centres, units, row, 1),
                _delta(votes[1], votes[2], vote, inside, centres, units, row, 2),
            )
            square = d[0] * d[0] + d[1] * d[1] + d[2] * d[2]
            near = inside & (landmark == current) & (square <= tl.load(reach) * tl.load(reach))
            total = sums + row * width
            if tl.max(near.to(tl.int32), 0) > 0:
                _add(total, weight, near)
                for axis in tl.static_range(3):
                    if all_terms:
                        point = _delta(votes[3], votes[4], vote, inside, centres, units, row, axis)
                        _add(total + 1 + axis, weight * point, near)
                    else:
                        _add(total + 1 + axis, weight * d[axis], near)
                if all_terms:
                    _add(total + 4, weight * d[0] * d[0], near)
                    _add(total + 5, weight * d[0] * d[1], near)
                    _add(total + 6, weight * d[0] * d[2], near)
                    _add(total + 7, weight * d[1] * d[1], near)
                    _add(total + 8, weight * d[1] * d[2], near)
                    _add(total + 9, weight * d[2] * d[2], near)
        current += 1


@triton.jit
@no_type_check
def _delta(points, steps, vote, inside, centres, units, row, axis: tl.constexpr):
    """Compute how far points are from a mode along an axis, in reaches."""
    point = tl.load(points + vote * steps[0] + axis * steps[1], mask=inside, other=0.0)
    return point.to(tl.float64) * tl.load(units + axis) - tl.load(centres + row * 3 + axis)


@triton.jit
@no_type_check
def _add(target, terms, near):
    """Add the terms of the near votes, each rounded to a whole number."""
    terms = tl.where(near, (terms + ROUNDER) - ROUNDER, 0.0).to(tl.int64)
    tl.atomic_add(target, tl.sum(terms, 0), sem="relaxed")
