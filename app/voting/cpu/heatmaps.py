"""votes -> planes of heatmaps, compiled: the loops of ``app.voting.heatmaps.aggregate`` on a CPU.

Votes are first sorted by the plane they fall into, (heatmap, i), so that each plane is summed in a
scratch pad that stays in the cache, and a table of counters for all voxels never exists.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from typing import Final, no_type_check

import numpy as np

from app.compute import numba_jit

OUTSIDE: Final = -1


@numba_jit
@no_type_check
def _nearest(x, size):
    """Round to the nearest index, halves up; ``OUTSIDE`` where there is no such voxel."""
    # float64, because 0.49999997 + 0.5 is 1 in float32. A NaN fails both comparisons.
    nearest = np.floor(np.float64(x) + 0.5)
    return np.int64(nearest) if 0 <= nearest < size else OUTSIDE


@numba_jit
@no_type_check
def sort_by_plane(which, position, weight, one, shape):
    """Sort votes by the plane of the heatmaps that they fall into; a stable counting sort.

    Args:
        which: Heatmap of each vote; votes with any other than 0 to the last are left out.
        position: Of each vote, (3 votes), in voxels; votes outside are left out.
        weight: Of each vote.
        one: Fixed-point units per 1.0.
        shape: Heatmaps, and voxels along i, j and k.

    Returns:
        Where each plane's votes begin, and for each vote its pixel in the plane and its weight in
        fixed-point units.
    """
    heatmaps, depth, height, width = shape
    planes = np.empty(len(which), dtype=np.int32)
    starts = np.zeros(heatmaps * depth + 1, dtype=np.int64)
    for vote in range(len(which)):
        i = _nearest(position[0, vote], depth)
        inside = i >= 0 and 0 <= which[vote] < heatmaps
        plane = which[vote] * depth + i if inside else OUTSIDE
        if _nearest(position[1, vote], height) < 0 or _nearest(position[2, vote], width) < 0:
            plane = OUTSIDE
        planes[vote] = plane
        starts[plane + 1] += plane != OUTSIDE
    starts[:] = np.cumsum(starts)
    pixels = np.empty(starts[-1], dtype=np.int64)
    terms = np.empty(starts[-1], dtype=np.float64)
    place = starts[:-1].copy()
    for vote in range(len(which)):
        plane = planes[vote]
        if plane == OUTSIDE:
            continue
        j, k = _nearest(position[1, vote], height), _nearest(position[2, vote], width)
        pixels[place[plane]] = j * width + k
        terms[place[plane]] = np.rint(weight[vote] * one)
        place[plane] += 1
    return starts, pixels, terms


@numba_jit
@no_type_check
def sum_planes(starts, pixels, terms, scale, first, last, heatmaps):
    """Sum the votes of some planes.

    Args:
        starts: As ``sort_by_plane`` returns it.
        pixels: Likewise.
        terms: Likewise: whole numbers, whose sums below 2^53 float64 holds exactly.
        scale: What one unit of weight is.
        first: First plane.
        last: Plane to stop before.
        heatmaps: (planes pixels), zeros; is written where there are votes.
    """
    pad = np.zeros(heatmaps.shape[1], dtype=np.float64)
    for plane in range(first, last):
        if starts[plane] == starts[plane + 1]:
            continue
        for vote in range(starts[plane], starts[plane + 1]):
            pad[pixels[vote]] += terms[vote]
        for pixel in range(len(pad)):
            heatmaps[plane, pixel] = pad[pixel] * scale
            pad[pixel] = 0.0
