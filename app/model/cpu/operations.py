"""What a network's operations do on a CPU, where PyTorch's own way is slow or depends on the batch.

Before each convolution, the pass's thread may do something else: a pass over a large grid takes
seconds, its convolutions tens of milliseconds each.

* **Convolutions**, transposed ones as well, go to oneDNN for a batch of one tile, too. PyTorch
  hands one to oneDNN if the batch holds several images, or channels * i * j of its one image exceed
  20,480 (``use_mkldnn`` in ATen's Convolution.cpp): a rule that was made for images with two axes.
  A small volume alone falls back to a loop that sums in another order, and is three to six times
  slower. The rule for 3D has been mended before: https://github.com/pytorch/pytorch/pull/46675.
* **Group and instance norms** of channels-last tiles are computed by ``app.model.cpu.norms``, and
  others tile by tile: a tile's output must depend neither on its batch nor on the threads. The
  convolutions sum alike in batches of any size.
* **The last layer** of a network of votes computes the scores alone; see ``app.model.cpu.heads``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import group_norm, instance_norm
from torch.overrides import TorchFunctionMode

from app.model.cpu.heads import DeferredOutput, Head
from app.model.cpu.norms import can_norm, norm_groups


class CpuKernels(TorchFunctionMode):
    """Context in which operations on a CPU are computed as the module says.

    Code that does not call Python's functions, such as TorchScript or ONNX, is not affected.

    Attributes:
        deferred: What was computed of the layer that may be the last one; None: nothing.
    """

    def __init__(self, give_way: Callable[[], None], head: Head | None = None) -> None:
        """Have a function called before each convolution, and of a layer the scores computed."""
        super().__init__()
        self._give_way, self._head = give_way, head
        self.deferred: DeferredOutput | None = None

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call a function, or what stands in for it."""
        del types
        if func is torch.conv3d:
            # What others keep of their tiles is written to later, when no such mode is on.
            with torch.inference_mode(False):
                self._give_way()
            if self._head is not None and len(args) > 1 and args[1] is self._head.weight:
                self.deferred = _defer(args[0], self._head)
                return self.deferred.stand_in
            func = _conv3d
        elif func is torch.conv_transpose3d:
            func = _conv_transpose3d
        elif func is group_norm:
            func = _group_norm
        elif func is instance_norm:
            func = _instance_norm
        return func(*args, **(kwargs or {}))


def _defer(features: Tensor, head: Head) -> DeferredOutput:
    scores = _conv3d(features, head.score_weight, head.score_bias)
    shape = (len(features), len(head.weight), *features.shape[2:])
    return DeferredOutput(features.new_empty(1).expand(shape), scores, features)


def _conv3d(
    input: Tensor,  # noqa: A002 - the name that callers may use
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str) or not _takes_onednn(input, weight):
        return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)
    pads, steps, gaps = map(_each_axis, (padding, stride, dilation))
    return torch.mkldnn_convolution(input, weight, bias, pads, steps, gaps, groups)


def _conv_transpose3d(
    input: Tensor,  # noqa: A002 - the name that callers may use
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    pads, ends, steps, gaps = map(_each_axis, (padding, output_padding, stride, dilation))
    # Of other kinds, PyTorch gives oneDNN no batch of any size.
    ends_within = all(end < step for end, step in zip(ends, steps, strict=True))
    if not ends_within or groups == input.shape[1] > 1 or not _takes_onednn(input, weight):
        return torch.conv_transpose3d(input, weight, bias, steps, pads, ends, groups, gaps)
    convolve = torch.ops.mkldnn._convolution_transpose_pointwise  # noqa: SLF001 - there is no other
    made: Tensor = convolve(input, weight, bias, pads, ends, steps, gaps, groups, "none", [], "")
    return made


def _takes_onednn(input: Tensor, weight: Tensor) -> bool:  # noqa: A002
    is_float32 = input.dtype == weight.dtype == torch.float32
    return is_float32 and torch.backends.mkldnn.is_available()


def _each_axis(numbers: int | Sequence[int]) -> Sequence[int]:
    each = [numbers] if isinstance(numbers, int) else numbers
    return [*each] * 3 if len(each) == 1 else each


def _group_norm(
    input: Tensor,  # noqa: A002 - torch's
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if can_norm(input):
        return norm_groups(input, num_groups, weight, bias, eps)
    return torch.cat([group_norm(tile, num_groups, weight, bias, eps) for tile in input.split(1)])


def _instance_norm(
    input: Tensor,  # noqa: A002 - torch's
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if use_input_stats and can_norm(input):
        return norm_groups(input, input.shape[1], weight, bias, eps)
    return instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )
