"""votes -> votes landmark by landmark, compiled: the loops of ``app.voting.ballots``.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import no_type_check

import numpy as np

from app.compute import numba_jit


@numba_jit
@no_type_check
def count_votes(landmark, starts):
    """Count the votes of each landmark.

    Args:
        landmark: Of each vote.
        starts: Zeros, one more than landmarks; where each landmark's votes begin, afterwards.
    """
    for vote in range(len(landmark)):
        starts[landmark[vote] + 1] += 1
    for mine in range(1, len(starts)):
        starts[mine] += starts[mine - 1]


@numba_jit
@no_type_check
def group_votes(landmark, position, source, weight, one, starts, columns, units):
    """Put the votes of each landmark together, in the order in which they come.

    Args:
        landmark: Of each vote.
        position: Of each vote, (3 votes).
        source: Of each vote, (3 votes).
        weight: Of each vote.
        one: Fixed-point units of a weight of 1.
        starts: Where each landmark's votes begin.
        columns: Position and source, (6 votes); is written.
        units: Weights, in whole fixed-point units; is written.
    """
    places = starts.copy()
    for vote in range(len(landmark)):
        place = places[landmark[vote]]
        places[landmark[vote]] = place + 1
        for axis in range(3):
            columns[axis, place] = position[axis, vote]
            columns[3 + axis, place] = source[axis, vote]
        # Exact in float32: a product with a power of two, then a whole number below 2^24.
        units[place] = np.rint(weight[vote] * one)
