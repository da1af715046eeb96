"""P3, shift and sum, by the fixed point of the heatmaps: voting with one offset per channel.

An example of what the sums of voting are good for besides voting; the product does not need it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from app.voting.reference import FIXED_ONE


def shift_and_sum(
    x: Float[Tensor, "batch channels h w"], mask: Tensor, step: int
) -> Float[Tensor, "batch 1 h wide"]:
    """Shift channel i right by i * step and sum all channels: the known case P3.

    One constant offset per channel, so a whole channel is added at once: the targets of a slice
    are a slice. The sums are the same fixed-point sums as those of ``aggregate``, to the bit.

    Args:
        x: Values, of a size for which 2^-24 per term is fine.
        mask: What the values are multiplied by; broadcasts against ``x``.
        step: Shift per channel in pixels.

    Returns:
        The sums, wide = w + (channels - 1) * step.
    """
    batch, channels, height, width = x.shape
    # Scaled by a power of two, the product has the same bits; it only is in fixed-point units.
    units = torch.broadcast_to(mask.float() * FIXED_ONE, x.shape)
    wide = width + (channels - 1) * step
    summed = x.new_empty(batch, 1, height, wide, dtype=torch.float32)
    terms = torch.empty(height, width, device=x.device)
    # Whole numbers below 2^53 are exact in float64, and need no conversion before they are added.
    total = torch.empty(height, wide, dtype=torch.float64, device=x.device)
    for row in range(batch):
        total.zero_()
        for i in range(channels):
            torch.mul(x[row, i], units[row, i], out=terms).round_()
            total[:, i * step : i * step + width] += terms
        torch.mul(total, 1 / FIXED_ONE, out=summed[row, 0])
    return summed
