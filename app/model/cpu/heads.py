"""A network's last layer, of which a pass computes the scores alone.

Three of four numbers that a network of votes answers are offsets, and hardly one in a hundred of
them is read: those of voxels that vote. Where the last layer is a convolution of single voxels,
they can be computed from what it reads once it is known which voxels these are. So the pass neither
computes nor writes the others.

Whether a layer is the last one shows in the pass itself: in the place of its output the network is
given a tensor that takes no memory, and must hand on that very one. The output of a network that
does anything else with it is not used.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DeferredOutput:
    """What a pass computed in the place of its output.

    Attributes:
        stand_in: What the network was given for it: its shape, and no values.
        scores: The first channels of the output.
        features: From which the last layer computes all channels.
    """

    stand_in: Float[Tensor, "n channels i j k"]
    scores: Float[Tensor, "n scores i j k"]
    features: Float[Tensor, "n features i j k"]


class Head:
    """A layer that may be the last one.

    Attributes:
        weight: By which its call is known; for each channel of the output, one number per feature.
        bias: One number for each channel.
    """

    def __init__(self, layer: nn.Conv3d, scores: int) -> None:
        """Take a convolution of single voxels, and of how many channels to compute the output."""
        self.weight, self.bias = layer.weight, layer.bias
        with torch.no_grad():
            weight = layer.weight[:scores].clone(memory_format=torch.channels_last_3d)
            self.score_weight = weight
            self.score_bias = None if layer.bias is None else layer.bias[:scores].clone()


def find_head(module: nn.Module, channels: int, scores: int) -> Head | None:
    """Return the layer that is likely to be a network's last one, if it can be divided.

    Args:
        module: The network.
        channels: Of its output.
        scores: How many of them, the first ones, are scores.
    """
    last = find_last_convolution(module)
    if type(last) is not nn.Conv3d:  # A subclass may do anything else besides.
        return None
    sees_one_voxel = {*last.kernel_size, *last.stride} == {1} and last.groups == 1
    if not sees_one_voxel or last.padding not in (0, (0, 0, 0)) or last.out_channels != channels:
        return None
    return Head(last, scores)


def find_last_convolution(module: nn.Module) -> nn.Conv3d | None:
    """Return the last convolution of a network, in the order of its modules; None: it has none."""
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv3d)]
    return convolutions[-1] if convolutions else None
