"""Values of a volume at any place between its voxels."""

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from app.compute import upload_numbers
from app.preprocessing.cpu.sampling import sample_planes


def sample_at(
    voxels: Shaped[Tensor, "a b c"], index: Float[Tensor, "i j k 3"]
) -> Float[Tensor, "i j k"]:
    """Interpolate voxels linearly at fractional indices; 0 outside the scan.

    Args:
        voxels: float32; or what ``smooth_for`` makes of a window.
        index: Where to sample.
    """
    if index.device.type != "cpu":
        # grid_sample wants the fastest axis first, and -1 and 1 at the outer faces of the scan.
        per_voxel = upload_numbers(2 / np.array(voxels.shape[::-1], np.float32), index.device)
        unit = index.flip(-1).add_(0.5).mul_(per_voxel).sub_(1)
        return functional.grid_sample(voxels[None, None], unit[None], align_corners=False)[0, 0]
    order = sorted(range(3), key=voxels.stride, reverse=True)
    sampled = torch.empty(index.shape[:3])
    dense = voxels.permute(order).contiguous()
    sample_planes(dense.numpy(), order, index.numpy(), sampled.numpy())
    return sampled
