"""A scan -> the same scan, as blurred as a coarser grid would show it; compiled for the CPU.

The CPU filters along all three axes in one pass, plane by plane, so that what one axis gives is
still in the cache when the next one reads it.
"""

from functools import partial
from typing import Final, no_type_check

import numpy as np
import torch
from jaxtyping import Float32

from app.compute import Voxels, numba_jit, run_parts, split_range
from app.geometry import Affine, spacing_of
from app.preprocessing.resampling import KERNEL_RADIUS_SIGMAS, Band, apply_along, gaussians

PLANES_PER_THREAD: Final = 32
"""Planes that are worth a thread of their own, which filters some planes of its neighbours too."""


def smooth_for(
    values: Voxels,
    spacing_mm: float,
    affine: Affine,
    window: tuple[float, float] | None = None,
) -> Voxels:
    """Smooth a scan for resampling to a coarser spacing, but keep its own resolution.

    Args:
        values: Voxel values, dense in memory, in any order of axes.
        spacing_mm: Of the grid, whose axes may have any direction.
        affine: Of the scan.
        window: Voxel values that are to become 0 and 1 before smoothing, and those beyond them,
            too; None: values stay as they are.

    Returns:
        The scan with the point spread function that ``resample`` would give it, float32.
    """
    steps = [float(spacing_mm / spacing) for spacing in spacing_of(affine)]
    sigmas = [0.5 * float(np.sqrt(max(step**2 - 1, 0.0))) for step in steps]
    lower, upper = window or (0.0, 1.0)
    width = max(upper - lower, 1e-6)
    if values.device.type == "cpu":
        limits = (-np.inf, np.inf) if window is None else (0.0, 1.0)
        return _smooth_on_cpu(values, sigmas, np.array([lower, width, *limits], np.float32))
    if window is not None:
        values = values.sub(lower).div_(width).clamp_(0.0, 1.0)
    for axis, (size, sigma) in enumerate(zip(values.shape, sigmas, strict=True)):
        if sigma > 0:
            values = apply_along(values, axis, size, partial(_smoothing_rows, size, sigma))
    return values


def _smoothing_rows(size: int, sigma: float, block: slice) -> Band:
    return gaussians(np.arange(size)[block], size, sigma)


def _smooth_on_cpu(values: Voxels, sigmas: list[float], window: np.ndarray) -> Voxels:
    order = sorted(range(3), key=values.stride, reverse=True)
    dense = values.permute(order).numpy()
    kernels = [_kernels(values.shape[axis], sigmas[axis]) for axis in order]
    smooth = np.empty_like(dense)
    bounds = split_range(len(dense), PLANES_PER_THREAD)
    run_parts(
        lambda part: _smooth(dense, window, *kernels, smooth, bounds[part], bounds[part + 1]),
        len(bounds) - 1,
    )
    return torch.from_numpy(smooth).permute([order.index(axis) for axis in range(3)])


def _kernels(size: int, sigma: float) -> Float32[np.ndarray, "taps size"]:
    """Build the Gaussian around each voxel of a line, by the distance from it; 0 past the ends."""
    radius = int(KERNEL_RADIUS_SIGMAS * sigma + 1) if sigma > 0 else 0
    distance = np.arange(-radius, radius + 1)[:, None]
    voxel = np.arange(size) + distance
    weights = np.exp(-0.5 * (distance / max(sigma, 1e-6)) ** 2) * ((voxel >= 0) & (voxel < size))
    return np.asarray(weights / weights.sum(axis=0), np.float32)


@numba_jit
@no_type_check
def _smooth(voxels, window, slow, middle, fast, smooth, first, last):
    """Fill the planes of ``smooth`` from the first to before the last."""
    a, b, c = voxels.shape
    before = len(slow) // 2
    # The last planes that are filtered along both of their axes, in turns.
    planes = np.empty((len(slow), b, c), np.float32)
    rows = np.zeros((b + len(middle) - 1, c), np.float32)
    line = np.zeros(c + len(fast) - 1, np.float32)
    for i in range(first - before, last + before):
        if 0 <= i < a:
            _filter_plane(voxels[i], window, middle, fast, line, rows, planes[i % len(slow)])
        done = i - before
        if done >= first:
            smooth[done] = 0
            for tap in range(max(before - done, 0), min(before + a - done, len(slow))):
                plane = planes[(done - before + tap) % len(slow)]
                for j in range(b):
                    _add(plane[j], slow[tap, done], smooth[done, j])


@numba_jit
@no_type_check
def _filter_plane(voxels, window, middle, fast, line, rows, plane):
    """Filter along both axes of a plane; ``line`` and ``rows`` have margins of zeros."""
    lower, width, least, most = window
    above, left = len(middle) // 2, len(fast) // 2
    for j in range(len(voxels)):
        for k in range(voxels.shape[1]):
            line[left + k] = min(max((voxels[j, k] - lower) / width, least), most)
        _sum_up(line, fast, rows[above + j])
    for j in range(len(plane)):
        plane[j] = 0
        for tap in range(len(middle)):
            _add(rows[j + tap], middle[tap, j], plane[j])


@numba_jit
@no_type_check
def _sum_up(line, kernels, total):
    """Filter a line that has margins of zeros."""
    total[:] = 0
    for tap in range(len(kernels)):
        weights = kernels[tap]
        for k in range(len(total)):
            total[k] += weights[k] * line[tap + k]


@numba_jit
@no_type_check
def _add(line, weight, total):
    for k in range(len(total)):
        total[k] += weight * line[k]
