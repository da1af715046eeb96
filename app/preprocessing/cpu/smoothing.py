"""A scan, filtered along all three axes in one pass.

It goes plane by plane, so that what one axis gives is still in the cache when the next one reads
it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Shaped

from app.compute import numba_jit, run_split
from app.preprocessing.cpu.slabs import float_slabs

PLANES_PER_THREAD: Final = 32
"""Planes that are worth a thread of their own, which filters some planes of its neighbours too."""

Filter = tuple[Float32[np.ndarray, " _half"], Float32[np.ndarray, " _size"]]
"""A symmetric filter: its taps from the first to the middle one, and a factor for each voxel."""


class Levels(NamedTuple):
    """Numbers that voxel values become: ``clip((value - lower) scale, least, most)``.

    Attributes:
        rounding: Is added once they are filtered; 0.5 to round them to integers.
    """

    lower: float = 0.0
    scale: float = 1.0
    least: float = -np.inf
    most: float = np.inf
    rounding: float = 0.0


def make_filter(size: int, kernel: Float64[np.ndarray, " taps"]) -> Filter:
    """Prepare a symmetric kernel for lines of so many voxels; past their ends nothing counts."""
    radius = len(kernel) // 2
    total = np.convolve(np.ones(size), kernel)[radius : radius + size]
    # No voxel of a thin scan has neighbours that its outer taps would reach.
    reach = min(radius, size - 1)
    return kernel[radius - reach : radius + 1].astype(np.float32), (1 / total).astype(np.float32)


def smooth_planes(
    voxels: Shaped[np.ndarray, "a b c"],
    filters: Sequence[Filter],
    levels: Levels,
    smooth: Shaped[np.ndarray, "a b c"],
) -> None:
    """Filter a scan along its axes.

    Args:
        voxels: Of any type, the slowest axis in memory first.
        filters: For each axis.
        levels: Of the result.
        smooth: Is filled: float32 or uint16, contiguous.
    """
    a, b, c = voxels.shape
    before, above, left = (len(taps) - 1 for taps, _ in filters)
    limits = np.array(levels, np.float32)

    def fill(begin: int, end: int) -> None:
        line = np.zeros(c + 2 * left, np.float32)
        rows = np.zeros((b + 2 * above, c), np.float32)
        planes = np.zeros((2 * before + 1, b, c), np.float32)
        for start, slab in float_slabs(voxels, max(begin - before, 0), min(end + before, a)):
            # The last planes have neighbours past the end.
            count = len(slab) + (before if start + len(slab) == a else 0)
            _smooth_slab(
                slab, start, count, limits, *filters, line, rows, planes, smooth, begin, end
            )

    run_split(fill, a, PLANES_PER_THREAD)


@numba_jit
def _smooth_slab(
    slab, start, count, limits, slow, middle, fast, line, rows, planes, smooth, begin, end
):  # fmt: skip
    """Fill the planes of ``smooth`` whose last neighbour is one of ``count`` planes.

    The first of them are those of the slab; all others are zeros. ``line`` and ``rows`` have
    margins of zeros. ``planes`` holds the last ones that are filtered along both of their axes, in
    turns.
    """
    before = len(slow[0]) - 1
    ring, b, c = planes.shape
    for s in range(count):
        if s < len(slab):
            _filter_plane(slab[s], limits, middle, fast, line, rows, planes[(start + s) % ring])
        else:
            planes[(start + s) % ring] = 0
        i = start + s - before
        if begin <= i < end:
            total = line[len(fast[0]) - 1 :]
            for j in range(b):
                for k in range(c):
                    total[k] = slow[0][before] * planes[i % ring, j, k]
                for tap in range(before):
                    p, q = (i - before + tap) % ring, (i + before - tap) % ring
                    for k in range(c):
                        total[k] += slow[0][tap] * (planes[p, j, k] + planes[q, j, k])
                share = slow[1][i] * middle[1][j]
                for k in range(c):
                    smooth[i, j, k] = total[k] * share * fast[1][k] + limits[4]


@numba_jit
def _filter_plane(voxels, limits, middle, fast, line, rows, plane):
    """Filter along both axes of a plane, but for the factors of its voxels."""
    lower, scale, least, most, _ = limits
    above, left = len(middle[0]) - 1, len(fast[0]) - 1
    b, c = voxels.shape
    inner = line[left:]
    for j in range(b):
        for k in range(c):
            inner[k] = min(max((voxels[j, k] - lower) * scale, least), most)
        for k in range(c):
            rows[above + j, k] = fast[0][left] * inner[k]
        for tap in range(left):
            # Views, as sums of two indices would keep the compiler from vectorising the loop.
            lower_side, upper_side = line[tap:], line[2 * left - tap :]
            for k in range(c):
                rows[above + j, k] += fast[0][tap] * (lower_side[k] + upper_side[k])
    for j in range(b):
        for k in range(c):
            plane[j, k] = middle[0][above] * rows[above + j, k]
        for tap in range(above):
            for k in range(c):
                plane[j, k] += middle[0][tap] * (rows[j + tap, k] + rows[j + 2 * above - tap, k])
