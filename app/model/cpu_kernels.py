"""What a network's operations do on a CPU, where PyTorch's own way is slow or depends on the batch.

Before each convolution, the device's thread may do something else: a pass over a large grid takes
seconds, its convolutions tens of milliseconds each.

* **Convolutions** go to oneDNN for a batch of one tile, too. PyTorch hands one to oneDNN if the
  batch holds several images, or channels * i * j of its one image exceed 20,480 (``use_mkldnn`` in
  ATen's Convolution.cpp): a rule that was made for images with two axes. A small volume alone falls
  back to a loop that is three to six times slower. The rule for 3D has been mended before:
  https://github.com/pytorch/pytorch/pull/46675.
* **Group norms** are computed tile by tile. PyTorch sums the voxels of channels-last tiles in parts
  whose number depends on the batch (``group_norm_kernel.cpp``), so a scan's landmarks would move a
  little with the scans that share its batch. The convolutions sum alike in batches of any size.
  Groups of few channels in bfloat16, which it reads number by number, are computed in float32: with
  the copies, that takes less than a third of the time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import group_norm
from torch.overrides import TorchFunctionMode

NARROW: Final = 8
"""Channels of a group that PyTorch reads as a vector, in bfloat16."""

MAX_WIDENED: Final = 1 << 23
"""Numbers of a tile that are copied as float32: larger copies get new memory each time, and to
clear that takes longer than is gained."""


class CpuKernels(TorchFunctionMode):
    """Context in which operations on a CPU are computed as the module says.

    Code that does not call Python's functions, such as TorchScript or ONNX, is not affected.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        """Have a function called before each convolution."""
        super().__init__()
        self._give_way = give_way

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as of whatever is called
        """Call a function, or what stands in for it."""
        del types
        if func is torch.conv3d:
            self._give_way()
            func = _conv3d
        elif func is group_norm:
            func = _group_norm
        return func(*args, **(kwargs or {}))


def _conv3d(  # noqa: PLR0913, PLR0917 - torch's own signature
    input: Tensor,  # noqa: A002 - the name that callers may use
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    supported = input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32
    if not supported or isinstance(padding, str) or not torch.backends.mkldnn.is_available():
        return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)
    edges = [[one] * 3 if isinstance(one, int) else one for one in (padding, stride, dilation)]
    return torch.mkldnn_convolution(input, weight, bias, *edges, groups)  # type: ignore[arg-type, call-arg]


def _group_norm(
    input: Tensor,  # noqa: A002 - torch's
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if input.device.type != "cpu":
        return group_norm(input, num_groups, weight, bias, eps)
    widened = (
        input.dtype == torch.bfloat16
        and input.shape[1] < NARROW * num_groups
        and input[:1].numel() <= MAX_WIDENED
    )
    if widened:
        weight, bias = (each if each is None else each.float() for each in (weight, bias))
    tiles = (tile.float() if widened else tile for tile in input.split(1))
    normed = [group_norm(tile, num_groups, weight, bias, eps).to(input.dtype) for tile in tiles]
    return normed[0] if len(normed) == 1 else torch.cat(normed)
