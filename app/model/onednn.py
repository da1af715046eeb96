"""On a CPU, let oneDNN compute the 3D convolutions of a batch of one tile, too.

PyTorch hands a convolution to oneDNN if the batch holds several images, or channels * i * j of its
one image exceed 20,480 (``use_mkldnn`` in ATen's Convolution.cpp): a rule that was made for images
with two axes. A small volume alone falls back to a loop that is three to six times slower.
The rule for 3D has been mended before: https://github.com/pytorch/pytorch/pull/46675.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OneDnnConvolutions(TorchFunctionMode):
    """Context in which float32 3D convolutions on a CPU go to oneDNN, if torch has it.

    Code that does not call Python's functions, such as TorchScript or ONNX, is not affected.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as of whatever is called
        """Call a function, or its oneDNN equivalent."""
        del types
        if func is torch.conv3d:
            func = _conv3d
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
