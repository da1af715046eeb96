"""tile batch -> Fields: run the network and say how to read what it answers."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Field:
    """What a network says about one tile, or one array: a score and an offset per voxel and landmark.

    Attributes:
        scores: Scores or probabilities, any float type, any strides, (channels i j k). With
            ``softmax`` there is one channel more than landmarks: channel 0 is the background.
        offsets: From a field voxel's centre to the landmark, along grid axes i, j, k; any strides
            (landmark-major networks are read through a view).
        activation: What turns scores into probabilities; ``none``: they are probabilities already.
        background: Whether channel 0 of ``scores`` is the background.
        offset_scale: Grid voxels per unit of ``offsets``, along each axis.
    """

    scores: Float[Tensor, "channels i j k"]
    offsets: Float[Tensor, "3 landmarks i j k"]
    activation: Literal["sigmoid", "softmax", "none"]
    background: bool
    offset_scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
