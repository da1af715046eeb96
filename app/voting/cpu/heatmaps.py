"""Votes -> planes of heatmaps, compiled: the loops of ``app.voting.heatmaps``.

Votes are first sorted by the plane they fall into, (heatmap, i), so that each plane is summed in a
buffer that stays in the cache, and counters for all voxels never exist.
"""

from typing import Final

import numpy as np

from app.compute import numba_jit

OUTSIDE: Final = -1


@numba_jit
def _nearest(x, size):
    """Round to the nearest index, halves up; ``OUTSIDE`` if there is no such voxel."""
    # float64, because 0.49999997 + 0.5 is 1 in float32. A NaN fails both comparisons.
    nearest = np.floor(np.float64(x) + 0.5)
    return np.int64(nearest) if 0 <= nearest < size else OUTSIDE


@numba_jit
def sort_by_plane(heatmap, columns, one, shape):
    """Sort votes by the plane of the heatmaps that they fall into; a stable counting sort.

    Args:
        heatmap: Heatmap of each vote; votes with any other than 0 to the last are left out.
        columns: Of ``Votes``; votes outside the grid are left out.
        one: Fixed-point units of a weight of 1.
        shape: Heatmaps, and voxels along i, j and k.

    Returns:
        Where each plane's votes begin; and the pixel in the plane and the weight, in fixed-point
        units, of each vote.
    """
    heatmaps, depth, height, width = shape
    position, weight = columns[3:6], columns[7]
    planes = np.empty(len(heatmap), dtype=np.int32)
    starts = np.zeros(heatmaps * depth + 1, dtype=np.int64)
    for vote in range(len(heatmap)):
        i = _nearest(position[0, vote], depth)
        inside = i >= 0 and 0 <= heatmap[vote] < heatmaps
        plane = heatmap[vote] * depth + i if inside else OUTSIDE
        if _nearest(position[1, vote], height) < 0 or _nearest(position[2, vote], width) < 0:
            plane = OUTSIDE
        planes[vote] = plane
        starts[plane + 1] += plane != OUTSIDE
    starts[:] = np.cumsum(starts)
    pixels = np.empty(starts[-1], dtype=np.int64)
    terms = np.empty(starts[-1], dtype=np.float64)
    next_index = starts[:-1].copy()
    for vote in range(len(heatmap)):
        plane = planes[vote]
        if plane == OUTSIDE:
            continue
        j, k = _nearest(position[1, vote], height), _nearest(position[2, vote], width)
        pixels[next_index[plane]] = j * width + k
        terms[next_index[plane]] = np.rint(weight[vote] * one)
        next_index[plane] += 1
    return starts, pixels, terms


@numba_jit
def sum_planes(starts, pixels, terms, scale, first, last, heatmaps):
    """Sum the votes of some planes.

    Args:
        starts: Where each plane's votes begin, as ``sort_by_plane`` returns it.
        pixels: Pixel of each vote.
        terms: Weight of each vote: whole numbers, whose sums below 2^53 are exact in float64.
        scale: Weight of one unit.
        first: First plane.
        last: Plane to stop before.
        heatmaps: (planes pixels), zeros; written where there are votes.
    """
    sums = np.zeros(heatmaps.shape[1], dtype=np.float64)
    for plane in range(first, last):
        if starts[plane] == starts[plane + 1]:
            continue
        for vote in range(starts[plane], starts[plane + 1]):
            sums[pixels[vote]] += terms[vote]
        for pixel in range(len(sums)):
            heatmaps[plane, pixel] = sums[pixel] * scale
            sums[pixel] = 0.0
