"""P3, shift and sum, by three ways that are known: slices, a convolution, ``scatter_add_``."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

Batch = Float[Tensor, "batch channels h w"]
Mask = Float[Tensor, "h w"]
Sums = Float[Tensor, "batch 1 h wide"]


def by_slices(x: Batch, mask: Mask, step: int) -> Sums:
    """Add a channel after the other to the slice it is shifted to."""
    batch, channels, height, width = x.shape
    total = x.new_zeros(batch, 1, height, width + (channels - 1) * step)
    for i in range(channels):
        total[:, 0, :, i * step : i * step + width] += x[:, i] * mask
    return total


def by_convolution(x: Batch, mask: Mask, step: int) -> Sums:
    """Convolve with a kernel that holds a single one per channel, at its shift."""
    channels = x.shape[1]
    reach = (channels - 1) * step
    kernel = x.new_zeros(1, channels, 1, reach + 1)
    # conv2d correlates: the tap that looks back by i * step lies that far left of the last one.
    kernel[0, torch.arange(channels), 0, reach - step * torch.arange(channels)] = 1.0
    return functional.conv2d(functional.pad(x * mask, (reach, reach)), kernel)


def by_scatter_add(x: Batch, mask: Mask, step: int) -> Sums:
    """Scatter all channels at once; the index is expanded, so it takes no memory."""
    batch, channels, height, width = x.shape
    column = torch.arange(width, device=x.device)
    target = (column + step * torch.arange(channels, device=x.device)[:, None]).flatten()
    values = (x * mask).transpose(1, 2).reshape(batch, height, channels * width)
    total = x.new_zeros(batch, height, width + (channels - 1) * step)
    return total.scatter_add_(2, target.expand_as(values), values)[:, None]
