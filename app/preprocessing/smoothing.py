"""A scan -> the same scan, as blurred as a coarser grid would show it."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from app.compute import Voxels, upload
from app.geometry import Affine, spacing_of
from app.preprocessing.cpu.sampling import UINT16_ONE
from app.preprocessing.cpu.slabs import memory_order
from app.preprocessing.cpu.smoothing import Levels, make_filter, smooth_planes
from app.preprocessing.intensity import width_of
from app.preprocessing.resampling import apply_along, gaussian, gaussian_taps, smoothing_sigma


def smooth_for(
    voxels: Shaped[np.ndarray, "i j k"],
    spacing_mm: float,
    affine: Affine,
    device: torch.device,
    window: tuple[float, float] | None = None,
) -> Shaped[Tensor, "i j k"]:
    """Smooth a scan for resampling to a coarser spacing, but keep its own resolution.

    Args:
        voxels: Of a type that torch takes; any strides.
        spacing_mm: Of the grid, whose axes may have any direction.
        affine: Of the scan.
        device: Of the result.
        window: Voxel values that are to become 0 and 1 before smoothing, and those beyond them,
            too; None: values stay as they are.

    Returns:
        The scan with the point spread function that ``resample`` would give it, for ``sample_at``,
        in its order in memory: float32, or with a window on the CPU uint16, of which half as much
        is written and read.
    """
    sigmas = [smoothing_sigma(float(spacing_mm / spacing)) for spacing in spacing_of(affine)]
    if device.type == "cpu":
        return _smooth_on_cpu(voxels, sigmas, window)
    values = upload(voxels, device, "K")
    if window is not None:
        values = values.sub_(window[0]).div_(width_of(window)).clamp_(0.0, 1.0)
    return smooth(values, sigmas)


def smooth(values: Voxels, sigmas: Sequence[float]) -> Voxels:
    """Convolve a volume with a Gaussian; weights that lie outside of it count among those inside.

    Args:
        values: Dense in memory, in any order of axes.
        sigmas: Standard deviation in voxels, per axis; 0 leaves an axis as it is.
    """
    for axis, (size, sigma) in enumerate(zip(values.shape, sigmas, strict=True)):
        if sigma > 0:
            values = apply_along(values, axis, gaussian_taps(np.arange(size), size, sigma))
    return values


def _smooth_on_cpu(
    voxels: Shaped[np.ndarray, "i j k"], sigmas: list[float], window: tuple[float, float] | None
) -> Shaped[Tensor, "i j k"]:
    order = memory_order(voxels)
    dense = voxels.transpose(order)
    filters = [make_filter(voxels.shape[axis], gaussian(sigmas[axis])) for axis in order]
    levels = Levels()
    if window is not None:
        scale = UINT16_ONE / width_of(window)
        levels = Levels(window[0], scale, least=0.0, most=UINT16_ONE, rounding=0.5)
    smooth = np.empty(dense.shape, np.float32 if window is None else np.uint16)
    smooth_planes(dense, filters, levels, smooth)
    return torch.from_numpy(smooth).permute([order.index(axis) for axis in range(3)])
