"""mask -> indices: the step that torch is slow at on a CPU.

NumPy does it several times faster there, on the same memory: it finds the true elements of a mask
by whole machine words.
"""

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor


def true_indices(mask: Bool[Tensor, " n"]) -> Int64[Tensor, " found"]:
    """List the indices of the true elements, in order."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero(mask)[:, 0]
