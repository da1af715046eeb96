"""Values of a volume between its voxels: four times as fast as torch."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
from jaxtyping import Float32, Shaped

from app.compute import numba_jit, run_split

PLANES_PER_THREAD: Final = 8
"""Planes of a grid that are worth a thread of their own."""

UINT16_ONE: Final = 65_000
"""What stands for 1 where voxels from 0 to 1 are stored in two bytes; rounding may exceed it."""


def sample_planes(
    voxels: Shaped[np.ndarray, "a b c"],
    axes: Sequence[int],
    index: Float32[np.ndarray, "i j k 3"],
    sampled: Float32[np.ndarray, "i j k"],
) -> None:
    """Interpolate voxels linearly; 0 outside of them.

    Args:
        voxels: float32; or uint16, of which UINT16_ONE counts as 1. Contiguous.
        axes: Which of an index's numbers counts along each of their axes.
        index: Where to sample.
        sampled: Is filled.
    """
    unit = np.float32(1 / UINT16_ONE if voxels.dtype == np.uint16 else 1)
    sample = partial(_sample, voxels, tuple(axes), unit, index, sampled)
    run_split(sample, len(sampled), PLANES_PER_THREAD)


@numba_jit
def _sample(voxels, axes, unit, index, sampled, first, last):
    """Fill the planes of ``sampled`` from the first to before the last."""
    a, b, c = voxels.shape
    for i in range(first, last):
        for j in range(index.shape[1]):
            for k in range(index.shape[2]):
                x, y, z = index[i, j, k, axes[0]], index[i, j, k, axes[1]], index[i, j, k, axes[2]]
                total = np.float32(0)
                if 0 <= x < a - 1 and 0 <= y < b - 1 and 0 <= z < c - 1:
                    u, v, w = int(x), int(y), int(z)
                    after_v, after_w = y - np.float32(v), z - np.float32(w)
                    near = _across(voxels, u, v, w, after_v, after_w)
                    far = _across(voxels, u + 1, v, w, after_v, after_w)
                    total = near + (x - np.float32(u)) * (far - near)
                elif -1 < x < a and -1 < y < b and -1 < z < c:
                    total = _at_edge(voxels, x, y, z)
                sampled[i, j, k] = unit * total


@numba_jit
def _across(voxels, u, v, w, after_v, after_w):
    """Interpolate between four voxels of a plane."""
    near, far = np.float32(voxels[u, v, w]), np.float32(voxels[u, v + 1, w])
    near += after_w * (np.float32(voxels[u, v, w + 1]) - near)
    far += after_w * (np.float32(voxels[u, v + 1, w + 1]) - far)
    return near + after_v * (far - near)


@numba_jit
def _at_edge(voxels, x, y, z):
    """Interpolate where some of the eight voxels around a place may be missing, and count as 0."""
    total = np.float32(0)
    for corner in range(8):
        u = int(np.floor(x)) + (corner >> 2)
        v = int(np.floor(y)) + (corner >> 1 & 1)
        w = int(np.floor(z)) + (corner & 1)
        if 0 <= u < voxels.shape[0] and 0 <= v < voxels.shape[1] and 0 <= w < voxels.shape[2]:
            near = (1 - abs(x - np.float32(u))) * (1 - abs(y - np.float32(v)))
            total += near * (1 - abs(z - np.float32(w))) * np.float32(voxels[u, v, w])
    return total
