"""Tile batch -> Fields: run the network, and check what it answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from app.compute import describe_out_of_memory, is_out_of_memory
from app.errors import InsufficientMemory, LandmarkdError, NetworkFailed
from app.model.cpu import CpuKernels, find_head
from app.model.manifest import Manifest
from app.model.outputs import Field, VotesOutput, make_output

WEIGHT_AXES: Final = 5
"""Of the weights of a convolution in 3D, the only tensors that can be in the layout of images."""


def go_on() -> None:
    """Do nothing: nothing else is to be done during a pass."""


class Network:
    """A network on a device, and how its manifest says to read its output.

    Attributes:
        device: Where it runs.
        dtype: What its weights and activations are.
        passes: How often it looks at a tile: once for each member and mirror image.
    """

    def __init__(
        self,
        manifest: Manifest,
        module: nn.Module,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Move a network, or the list of its members, which is not copied, to a device."""
        self.device = device
        self.dtype = dtype
        self._output = make_output(manifest)
        axes = manifest.mirror_axes
        self._mirrors = [some for n in range(len(axes) + 1) for some in combinations(axes, n)]
        module = module.eval().to(device, dtype)
        for values in (*module.parameters(), *module.buffers()):
            if values.dim() == WEIGHT_AXES:
                # Free in float32, and the layout in which bfloat16 is fast, on CPUs as on CUDA.
                values.data = values.to(memory_format=torch.channels_last_3d)
        self._members = list(module) if isinstance(module, nn.ModuleList) else [module]
        self.passes = len(self._mirrors) * len(self._members)
        self._head = None
        if device.type == "cpu" and self.passes == 1 and isinstance(self._output, VotesOutput):
            scores, offsets = manifest.channels
            self._head = find_head(self._members[0], scores + offsets, scores)

    @property
    def precision(self) -> str:
        """Name what it computes in, such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def predict_tiles(
        self, tiles: Sequence[Float[Tensor, "1 i j k"]], give_way: Callable[[], None] = go_on
    ) -> list[Field]:
        """Stack tiles and run ``predict``, with errors that say what went wrong.

        On a CPU, the last layer is left to compute offsets where voxels vote, if that is possible.

        Raises:
            NetworkFailed: The network raised, or gave something else than it should.
            InsufficientMemory: The batch needs more memory than the device has.
        """
        try:
            stacked = torch.stack(list(tiles))
            return self._predict_scores(stacked, give_way) or self.predict(stacked, give_way)
        except LandmarkdError:
            raise
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise InsufficientMemory(
                    f"expected tiles that fit the device, got {len(tiles)} of shape "
                    f"{tuple(tiles[0].shape[1:])}: {describe_out_of_memory(error, self.device)}"
                ) from error
            raise NetworkFailed(f"the model's network raised {type(error).__name__}") from error

    def predict(
        self, tiles: Float[Tensor, "n 1 i j k"], give_way: Callable[[], None] = go_on
    ) -> list[Field]:
        """Run the network on a batch of tiles.

        Args:
            tiles: Normalised voxels, one shape for all; moved to the network's device if need be.
            give_way: Called on this thread before each convolution of a network in Python; it may
                run another network meanwhile, or this one.

        Returns:
            One Field per tile: where they can be, views of the network's one output; of several,
            of their mean.

        Raises:
            NetworkFailed: The output is not what the manifest promises.
        """
        tiles = tiles.to(self.device, self.dtype, memory_format=torch.channels_last_3d)
        kernels = CpuKernels(give_way) if self.device.type == "cpu" else nullcontext()
        with torch.inference_mode(), kernels:
            answers = self._answers(tiles)
            output = next(answers) if self.passes == 1 else self._output.mean(answers)
        return [self._output.field(one, tiles.shape[2:]) for one in output]

    def _predict_scores(
        self, tiles: Float[Tensor, "n 1 i j k"], give_way: Callable[[], None]
    ) -> list[Field] | None:
        """Do as ``predict``, but leave it to the last layer to compute offsets where voxels vote.

        Returns:
            One Field per tile; None if that cannot be, which is found out once.
        """
        head, output = self._head, self._output
        if head is None or not isinstance(output, VotesOutput):
            return None
        tiles = tiles.to(self.device, self.dtype, memory_format=torch.channels_last_3d)
        answer = None
        with torch.inference_mode(), CpuKernels(give_way, head) as kernels:
            try:
                answer = next(self._answers(tiles))
            except RuntimeError:
                if kernels.deferred is None:
                    raise  # Else it may be that the stand-in cannot be written to.
        deferred = kernels.deferred
        if deferred is None or answer is not deferred.stand_in:
            self._head = None  # Something follows the layer.
            return None
        parts = zip(deferred.scores, deferred.features, strict=True)
        return [output.deferred_field(scores, features, head) for scores, features in parts]

    def _answers(self, tiles: Tensor) -> Iterator[Float[Tensor, "n ..."]]:
        """Yield what each member answers for each mirror image, one at a time to save memory."""
        for axes in self._mirrors:
            seen = tiles.flip([axis + 2 for axis in axes]) if axes else tiles
            for member in self._members:
                # TorchScript may write to what it is given, which others are to see as it was.
                given = seen if self.passes == 1 else seen.clone()
                output = self._check(member(given), tiles)
                yield self._output.unmirror(output, axes, tiles.shape[2:]) if axes else output

    def _check(self, output: object, tiles: Tensor) -> Float[Tensor, "n ..."]:
        """Check that the output is one tensor of the promised shape, tiles first."""
        if isinstance(output, list | tuple) and len(output) == 1:
            output = output[0]
        if not isinstance(output, Tensor) or not output.is_floating_point():
            kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise NetworkFailed(f"expected one tensor of floats from the network, got {kind}")
        count, _, *edges = tiles.shape
        expected = [count, *self._output.shape(edges)]
        if list(output.shape) != expected:
            raise NetworkFailed(
                f"expected an output of shape {expected} ({self._output.describe(edges)}), got "
                f"{list(output.shape)}"
            )
        return output
