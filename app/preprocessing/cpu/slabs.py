"""A scan in the order of its memory, a few planes at a time in float32.

Filters that read a scan so never hold all of it in float32: what they read is still in the cache,
and a scan of any type takes the same compiled loop.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Float32, Shaped

SLAB_VOXELS: Final = 1 << 17
"""Voxels converted at once, of one plane at least: half a megabyte, which a core's cache holds."""


def memory_order(voxels: Shaped[np.ndarray, "i j k"]) -> list[int]:
    """Return the axes of an array from the slowest to the fastest in memory."""
    return sorted(range(3), key=lambda axis: abs(voxels.strides[axis]), reverse=True)


def float_slabs(
    voxels: Shaped[np.ndarray, "a b c"], first: int, last: int
) -> Iterator[tuple[int, Float32[np.ndarray, "slab b c"]]]:
    """Convert planes of an array, from the first to before the last.

    Args:
        voxels: Its slowest axis in memory first.
        first: The first plane.
        last: The plane after the last.

    Yields:
        The number of a slab's first plane, and its planes, which the next slab overwrites.
    """
    planes = max(1, SLAB_VOXELS // max(1, voxels[0].size))
    slab = np.empty((min(planes, last - first), *voxels.shape[1:]), np.float32)
    for start in range(first, last, planes):
        count = min(planes, last - start)
        np.copyto(slab[:count], voxels[start : start + count], casting="unsafe")
        yield start, slab[:count]
