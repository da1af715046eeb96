"""Tile batch -> Fields: run the network, and view its output as scores and offsets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from app.compute import describe_out_of_memory, is_out_of_memory
from app.errors import InsufficientMemory, LandmarkdError, NetworkFailed
from app.model.cpu_kernels import CpuKernels
from app.model.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Field:
    """Output of a network for one tile, or one array: scores and offsets per voxel and landmark.

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

    def __post_init__(self) -> None:
        """Refuse a softmax that leaves nothing for voxels which vote for no landmark."""
        if self.activation == "softmax" and not self.background:
            raise ValueError("expected a background channel with softmax, got none")


class Network:
    """A network on a device, and how its manifest says to read its output.

    Attributes:
        device: Where it runs.
        dtype: What its weights and activations are.
    """

    def __init__(
        self,
        manifest: Manifest,
        module: nn.Module,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Move a network to a device.

        Args:
            manifest: How to read its output.
            module: The network; it is moved, not copied.
            device: Where it shall run.
            dtype: Of its weights and activations: float32, bfloat16 or float16.
        """
        self.device = device
        self.dtype = dtype
        self._channels = manifest.channels
        self._stride = manifest.network.output_stride
        self._activation = manifest.network.activation
        self._order = manifest.network.offset_order
        self._offset_scale = (1.0, 1.0, 1.0)
        if manifest.network.offset_unit == "mm":
            x, y, z = manifest.input.spacing_mm
            self._offset_scale = (1 / x, 1 / y, 1 / z)
        # Free in float32, and the layout in which bfloat16 is fast, on CPUs as on CUDA.
        layout = torch.channels_last_3d
        self._module = module.eval().to(device, dtype, memory_format=layout)  # type: ignore[call-overload]

    @property
    def precision(self) -> str:
        """Name what it computes in, such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def predict_tiles(self, tiles: Sequence[Float[Tensor, "1 i j k"]]) -> list[Field]:
        """Stack tiles and run ``predict``, with errors that say what went wrong.

        Raises:
            NetworkFailed: The network raised, or gave something else than it should.
            InsufficientMemory: The batch needs more memory than the device has.
        """
        try:
            return self.predict(torch.stack(list(tiles)))
        except LandmarkdError:
            raise
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise InsufficientMemory(
                    f"expected tiles that fit the device, got {len(tiles)} of shape "
                    f"{tuple(tiles[0].shape[1:])}: {describe_out_of_memory(error, self.device)}"
                ) from error
            raise NetworkFailed(f"the model's network raised {type(error).__name__}") from error

    def predict(self, tiles: Float[Tensor, "n 1 i j k"]) -> list[Field]:
        """Run the network on a batch of tiles.

        Args:
            tiles: Normalised voxels, one shape for all; moved to the network's device if need be.

        Returns:
            One Field per tile: views of the network's one output, nothing is copied.

        Raises:
            NetworkFailed: The output is not what the manifest promises.
        """
        tiles = tiles.to(self.device, self.dtype, memory_format=torch.channels_last_3d)
        with torch.inference_mode(), CpuKernels():
            output = self._module(tiles)
        return [self._field(one) for one in self._check(output, tiles)]

    def _check(self, output: object, tiles: Tensor) -> Float[Tensor, "n channels u v w"]:
        """Check that the output is one tensor of the promised shape."""
        if isinstance(output, list | tuple) and len(output) == 1:
            output = output[0]
        if not isinstance(output, Tensor) or not output.is_floating_point():
            kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise NetworkFailed(f"expected one tensor of floats from the network, got {kind}")
        scores, offsets = self._channels
        count, _, *edges = tiles.shape
        expected = [count, scores + offsets, *(edge // self._stride for edge in edges)]
        if list(output.shape) != expected:
            raise NetworkFailed(
                f"expected an output of shape {expected} ({scores} scores and {offsets} offsets "
                f"for tiles of {edges} at output_stride {self._stride}), got {list(output.shape)}"
            )
        return output

    def _field(self, output: Float[Tensor, "channels u v w"]) -> Field:
        """View one tile's output as scores and offsets."""
        scores, offsets = output[: self._channels[0]], output[self._channels[0] :]
        edges = output.shape[1:]
        if self._order == "axis":
            offsets = offsets.view(3, -1, *edges)
        else:
            offsets = offsets.view(-1, 3, *edges).transpose(0, 1)
        return Field(
            scores=scores,
            offsets=offsets,
            activation=self._activation,
            background=self._activation == "softmax",
            offset_scale=self._offset_scale,
        )
