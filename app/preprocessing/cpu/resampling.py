"""Two axes of a scan, each multiplied by a matrix, while the planes that are read are cached."""

from typing import Final

import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped

from app.compute import numba_jit, run_split
from app.preprocessing.cpu.slabs import float_slabs

PLANES_PER_THREAD: Final = 8
"""New planes that are worth a thread of their own."""

Rows = tuple[Int64[np.ndarray, " _rows"], Float64[np.ndarray, "_rows _taps"]]
"""A matrix: the column of each row's first weight, and the weights of each."""


def resample_planes(
    voxels: Shaped[np.ndarray, "a b c"], slow: Rows, middle: Rows
) -> Float32[np.ndarray, "new_a new_b c"]:
    """Resample a scan along the two slower of its axes.

    Args:
        voxels: Of any type, the slowest axis in memory first.
        slow: The matrix for that axis; weights of columns that there are not must be 0.
        middle: That for the next one.
    """
    shape = (len(slow[0]), len(middle[0]), voxels.shape[2])
    filtered = np.zeros(shape, np.float32)
    matrices = [(first, weights.astype(np.float32)) for first, weights in (slow, middle)]

    def fill(begin: int, end: int) -> None:
        rows = np.empty(filtered.shape[1:], np.float32)
        start = max(int(slow[0][begin:end].min()), 0)
        stop = min(int(slow[0][begin:end].max()) + slow[1].shape[1], len(voxels))
        for plane, slab in float_slabs(voxels, start, stop):
            _filter_slab(slab, plane, *matrices, rows, filtered, begin, end)

    run_split(fill, len(filtered), PLANES_PER_THREAD)
    return filtered


@numba_jit
def _filter_slab(slab, start, slow, middle, rows, filtered, begin, end):
    """Add what a slab gives to the planes of ``filtered`` from one to before another."""
    slow_first, slow_weights = slow
    middle_first, middle_weights = middle
    for s in range(len(slab)):
        for j in range(len(rows)):
            for k in range(rows.shape[1]):
                rows[j, k] = 0
            for tap in range(middle_weights.shape[1]):
                weight = middle_weights[j, tap]
                if weight != 0:
                    row = middle_first[j] + tap
                    for k in range(rows.shape[1]):
                        rows[j, k] += weight * slab[s, row, k]
        for i in range(begin, end):
            tap = start + s - slow_first[i]
            if 0 <= tap < slow_weights.shape[1]:
                weight = slow_weights[i, tap]
                for j in range(len(rows)):
                    for k in range(rows.shape[1]):
                        filtered[i, j, k] += weight * rows[j, k]
