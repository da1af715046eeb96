"""The network that is trained: a U-Net whose stem takes the stride."""

from typing import Final

import torch
from torch import nn
from torch.nn.utils import convert_conv3d_weight_memory_format

from app.model import find_architecture, find_last_convolution
from app.training.recipe import Recipe

ARCHITECTURE: Final = "monai.networks.nets:DynUNet"

INITIAL_SCORE: Final = -6.0
"""Bias of the scores: about one voxel in 400 lies within the radius of a landmark."""

NORM_GROUPS: Final = 4
MIN_LEVELS: Final = 3
"""Constraints of the architecture on ``filters``: at least so many, multiples of the groups."""

BYTES_PER_FLOAT: Final = 4

ACTIVATION_COPIES: Final = 2.5
"""Memory of a training step over that of its activations: 2.2 was measured on a CPU, with
batches of 2 x 64³ voxels and 45 landmarks."""


def network_arguments(recipe: Recipe, landmarks: int) -> dict[str, object]:
    """Return the constructor arguments of the network."""
    levels = len(recipe.filters)
    strides = [recipe.stride] + [2] * (levels - 1)
    return {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 4 * landmarks,
        "kernel_size": [3] * levels,
        "strides": strides,
        "upsample_kernel_size": strides[1:],
        "filters": list(recipe.filters),
        # Not instance norm: it removes whatever is constant over a scan, such as its pose.
        "norm_name": ["GROUP", {"num_groups": NORM_GROUPS, "affine": True}],
    }


def build_network(recipe: Recipe, landmarks: int) -> nn.Module:
    """Build the network with fresh weights and low scores, as most voxels are no landmark."""
    architecture = find_architecture("training", ARCHITECTURE)
    network = architecture(**network_arguments(recipe, landmarks))
    head = find_last_convolution(network)
    if head is not None and head.bias is not None:
        with torch.no_grad():
            head.bias[:landmarks] = INITIAL_SCORE
    return network


def bring_to(device: torch.device, network: nn.Module) -> nn.Module:
    """Bring a network to a device, in the layout in which it is trained fastest there."""
    convert_conv3d_weight_memory_format(network.to(device), torch.channels_last_3d)
    if device.type == "cpu":
        normalise_channels_first(network)
    return network


def normalise_channels_first(network: nn.Module) -> None:
    """Make group norms compute with channels first, and hand on channels last as convolutions do.

    On a CPU, torch's gradient of a group norm with channels last takes up to ten times as long.
    """

    def channels_first(_module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0].contiguous(),)

    def channels_last(
        _module: nn.Module, _inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> torch.Tensor:
        return output.contiguous(memory_format=torch.channels_last_3d)

    for module in network.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(channels_first)
            module.register_forward_hook(channels_last)


def training_bytes(recipe: Recipe, landmarks: int) -> float:
    """Estimate the memory that a training step takes for each of its images.

    All activations are kept for the backward pass. They are counted on the meta device. Their
    gradients, and copies that convolutions make, are of about the same size.
    """
    sizes: list[int] = []
    with torch.device("meta"):
        network = build_network(recipe, landmarks)
        # Two: group norms refuse a single value in each group, as that of one image may be.
        images = torch.empty(2, 1, *recipe.largest_shape)
    for module in network.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, __, output: sizes.append(output.numel()))
    network(images)
    return ACTIVATION_COPIES * BYTES_PER_FLOAT * sum(sizes) / len(images)
