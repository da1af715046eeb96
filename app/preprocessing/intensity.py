"""Voxel values of a scan -> those that a network expects, by its intensity rule."""

import math
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from app.compute import Voxels, upload_numbers
from app.errors import ModelRefused
from app.io import FLOAT32_MAX
from app.model import IntensitySpec

PERCENTILE_SAMPLES: Final = 1 << 20
"""Percentiles are computed from at most twice this many evenly spaced voxels."""

SMALLER: Final = 2.0**-70
"""Multiplies voxel values whose differences or squares float32 does not hold."""

LEAST_DIFFERENCE: Final = 1e-5
"""Share of voxel values that counts as a difference between them. Numbers of 16 bits differ by
more; of a scan whose voxels are all alike, resampling in float32 makes a tenth of it."""

LEAST_DEVIATION: Final = 0.1
"""Least standard deviation of voxels that are not all alike, in least differences of them: what
resampling makes of equal ones. A whole difference would take contrast from most of a scan."""

MAX_SQUARABLE: Final = 1e18
"""Sums of squares of larger voxel values may be infinite in float32."""


def find_window(values: Voxels, intensity: IntensitySpec) -> tuple[float, float] | None:
    """Find the values that a model's intensity rule maps to 0 and 1; None if it has no window."""
    if intensity.method == "window":
        return intensity.lower, intensity.upper
    if intensity.method == "percentile":
        return percentiles(values, intensity.lower, intensity.upper)
    return None


def normalise_(
    values: Voxels, intensity: IntensitySpec, window: tuple[float, float] | None = None
) -> Voxels:
    """Apply a model's intensity rule in place; a constant volume becomes zeros, never NaN.

    Args:
        values: Voxel values, float32; they are overwritten.
        intensity: The rule.
        window: What ``find_window`` returns for the rule; None: it is found here.
    """
    if intensity.method == "none":
        return values
    if intensity.method == "zscore":
        return _standardise_(values, intensity.region)
    if intensity.method == "clip":
        values.clamp_(intensity.lower, intensity.upper)
        return values.sub_(intensity.mean).div_(intensity.deviation)
    lower, upper = window or find_window(values, intensity) or (0.0, 1.0)
    if upper - lower > FLOAT32_MAX:
        values.mul_(SMALLER)  # Exact; else the difference of two voxels would be infinite.
        lower, upper = lower * SMALLER, upper * SMALLER
    return values.sub_(lower).div_(width_of((lower, upper))).clamp_(0.0, 1.0)


def _standardise_(values: Voxels, region: str) -> Voxels:
    """Bring a region to mean 0 and standard deviation 1, in place; other voxels become 0."""
    bounds = [float(bound) for bound in values.aminmax()]
    if max(map(abs, bounds)) > MAX_SQUARABLE:
        values.mul_(SMALLER)  # Exact, and without effect on the result.
        bounds = [bound * SMALLER for bound in bounds]
    least = least_width(*bounds)
    if bounds[1] - bounds[0] <= least:
        return values.zero_()
    least *= LEAST_DEVIATION
    if region == "all":
        mean, deviation = values.mean(), values.std(correction=0)
        return values.sub_(mean).div_(deviation.clamp_min_(least))
    inside = values != 0
    if region == "filled":
        inside = fill_holes(inside)
    chosen = values[inside]
    mean, deviation = chosen.mean(), chosen.std(correction=0)
    values.sub_(mean).div_(deviation.clamp_min_(least))
    return values.masked_fill_(~inside, 0.0)


def width_of(window: tuple[float, float]) -> float:
    """Return what voxel values are divided by to map a window to 0 and 1."""
    return max(window[1] - window[0], least_width(*window))


def least_width(*bounds: float) -> float:
    """Return the least difference that counts as one, of voxel values within bounds.

    It is relative, since voxels may be in any unit: diffusivities in m²/s are some 1e-9.
    """
    return max(LEAST_DIFFERENCE * max(map(abs, bounds)), 1e-30)


def percentiles(values: Tensor, lower: float, upper: float) -> tuple[float, float]:
    """Compute two percentiles of at most twice PERCENTILE_SAMPLES evenly spaced voxels.

    Those of 0 and 100 % are the extremes of all voxels. Of voxels that are all alike, both are the
    highest, so that none lies above.
    """
    least, most = (float(extreme) for extreme in values.aminmax())
    if most - least <= least_width(least, most):
        return most, most
    low, high = _sampled_percentiles(values, lower, upper)
    return least if lower <= 0.0 else low, most if upper >= 100.0 else high


def _sampled_percentiles(values: Tensor, lower: float, upper: float) -> tuple[float, float]:
    flat = values.flatten()
    step = max(1, flat.numel() // PERCENTILE_SAMPLES)
    while math.gcd(step, flat.numel()) > 1:  # Else some slices would have no sample.
        step += 1
    sample = flat[::step].double()
    if sample.device.type == "cpu":
        # NumPy selects where torch sorts, which is eight times faster.
        low, high = np.percentile(sample.numpy(), [lower, upper])
        return float(low), float(high)
    shares = upload_numbers(np.array([lower, upper]) / 100, flat.device)
    low, high = torch.quantile(sample, shares).tolist()
    return low, high


def fill_holes(inside: Bool[Tensor, "i j k"]) -> Bool[Tensor, "i j k"]:
    """Add what a region encloses, by faces of voxels, as nnU-Net does to its mask.

    Raises:
        ModelRefused: SciPy, which does it, is not installed.
    """
    # An extra, which the networks of nnU-Net take in any case.
    try:
        from scipy.ndimage import binary_fill_holes
    except ImportError as error:
        raise ModelRefused(
            "input.intensity.region 'filled': expected SciPy; pip install 'landmarkd[nnunet]'"
        ) from error
    return torch.from_numpy(binary_fill_holes(inside.cpu().numpy())).to(inside.device)
