"""Values of a volume between its voxels, compiled for the CPU: four times as fast as torch."""

from typing import Final, no_type_check

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from app.compute import numba_jit, run_parts, split_range

PLANES_PER_THREAD: Final = 8
"""Planes of a grid that are worth a thread of their own."""


def sample_at(
    voxels: Float[Tensor, "a b c"], index: Float[Tensor, "i j k 3"]
) -> Float[Tensor, "i j k"]:
    """Interpolate voxels linearly at fractional indices; 0 outside the scan."""
    if index.device.type != "cpu":
        # grid_sample wants the fastest axis first, and -1 and 1 at the outer faces of the scan.
        size = torch.tensor(voxels.shape[::-1], dtype=torch.float32, device=index.device)
        unit = index.flip(-1).add_(0.5).mul_(2 / size).sub_(1)
        return functional.grid_sample(voxels[None, None], unit[None], align_corners=False)[0, 0]
    sampled = torch.empty(index.shape[:3])
    arrays = (voxels.numpy(), index.numpy(), sampled.numpy())
    bounds = split_range(len(sampled), PLANES_PER_THREAD)
    run_parts(lambda part: _sample(*arrays, bounds[part], bounds[part + 1]), len(bounds) - 1)
    return sampled


@numba_jit
@no_type_check
def _sample(voxels, index, sampled, first, last):
    """Fill the planes of ``sampled`` from the first to before the last."""
    a, b, c = voxels.shape
    for i in range(first, last):
        for j in range(index.shape[1]):
            for k in range(index.shape[2]):
                x, y, z = index[i, j, k]
                total = np.float32(0)
                if -1 < x < a and -1 < y < b and -1 < z < c:
                    u, before_u, after_u = _split(x, a)
                    v, before_v, after_v = _split(y, b)
                    w, before_w, after_w = _split(z, c)
                    p, q, r = min(u + 1, a - 1), min(v + 1, b - 1), min(w + 1, c - 1)
                    u, v, w = max(u, 0), max(v, 0), max(w, 0)
                    total = before_u * (
                        before_v * (before_w * voxels[u, v, w] + after_w * voxels[u, v, r])
                        + after_v * (before_w * voxels[u, q, w] + after_w * voxels[u, q, r])
                    ) + after_u * (
                        before_v * (before_w * voxels[p, v, w] + after_w * voxels[p, v, r])
                        + after_v * (before_w * voxels[p, q, w] + after_w * voxels[p, q, r])
                    )
                sampled[i, j, k] = total


@numba_jit
@no_type_check
def _split(x, size):
    """Return the voxel before a place, its weight, and that of the next; 0 outside."""
    before = int(np.floor(x))
    after = x - np.float32(before)
    return (
        before,
        np.float32(1) - after if before >= 0 else np.float32(0),
        after if before + 1 < size else np.float32(0),
    )
