"""Forward passes on CUDA as graphs: one launch instead of one for each of a network's kernels.

The host takes longer to launch the kernels of a small pass than the device to run them, and holds
Python's lock meanwhile. So a pass over tiles of a shape that comes again is captured as a graph and
replayed from then on. Only what gives the same bits as the kernels one by one is used; a network
that cannot be captured, such as one that looks at its values on the host, runs as it did.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

logger = logging.getLogger("landmarkd.model")

MAX_VOXELS: Final = 1 << 21
"""Of a pass that is captured. Larger ones keep the device busy for longer than their launches take,
and their intermediate results would hold gigabytes."""

MAX_GRAPHS: Final = 64
"""Shapes of passes that are known; of more, the ones that were used longest ago are forgotten."""

MAX_FAILURES: Final = 3
"""Captures that fail before no more are tried."""

Pool: TypeAlias = Any
"""What torch names a pool of memory by."""

Run: TypeAlias = Callable[[Float[Tensor, "n 1 i j k"]], Float[Tensor, "n ..."]]


class Graphs:
    """The graphs of one network, which share the memory of their intermediate results.

    That is sound as they never run at once: all are replayed on the device's default stream.
    """

    def __init__(self, run: Run) -> None:
        """Run passes by a function that launches their kernels."""
        self._run = run
        self._failures = 0
        # One pass at a time: replays of a graph share their input and output.
        self._lock = threading.Lock()
        self._clear()

    def __call__(self, tiles: Float[Tensor, "n 1 i j k"]) -> Float[Tensor, "n ..."]:
        """Run a pass; raises what the function does.

        Args:
            tiles: As for the function, on its device.

        Returns:
            What the function returns, in memory of its own.
        """
        device, shape = tiles.device, tuple(tiles.shape)
        if (
            device.type != "cuda"
            or tiles.numel() > MAX_VOXELS
            or self._failures == MAX_FAILURES
            or torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
        ):
            return self._run(tiles)
        with self._lock:
            if graph := self._graphs.get(shape):
                self._graphs.move_to_end(shape)
                return graph(tiles)
            output = self._run(tiles)
            is_known = shape in self._graphs
            self._graphs[shape] = self._capture(tiles, output) if is_known else None
            self._graphs.move_to_end(shape)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
            return output

    def clear(self) -> None:
        """Let go of all graphs and their memory."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._graphs = OrderedDict[tuple[int, ...], _Graph | None]()
        self._output: Tensor | None = None

    def _capture(self, tiles: Tensor, output: Tensor) -> "_Graph | None":
        """Capture a pass of which the output is known; None if that fails."""
        extent = 1 + sum((n - 1) * s for n, s in zip(output.shape, output.stride(), strict=True))
        if self._output is None or len(self._output) < extent or self._output.dtype != output.dtype:
            self._output = output.new_empty(extent)
        target = self._output.as_strided(output.shape, output.stride())
        pool = next((one.pool for one in self._graphs.values() if one is not None), None)
        try:
            graph = _Graph(self._run, tiles, target, pool)
            same = torch.equal(graph(tiles).nan_to_num_(), output.nan_to_num())
            reason = "it gives other values"
        except RuntimeError as error:
            same, reason = False, str(error).partition("\n")[0]
            # Torch believes that its generator of random numbers is still being captured.
            generator = torch.cuda.default_generators[tiles.device.index]
            generator.graphsafe_set_state(generator.clone_state())
        if same:
            return graph
        self._failures += 1
        extra = {"shape": list(tiles.shape), "reason": reason}
        logger.warning("forward pass not captured as a CUDA graph", extra=extra)
        return None


class _Graph:
    """A pass over tiles of one shape.

    Attributes:
        pool: Memory of its intermediate results.
    """

    def __init__(self, run: Run, tiles: Tensor, output: Tensor, pool: Pool | None) -> None:
        """Capture a pass that has run before, so that all its kernels are loaded.

        Args:
            run: Launches its kernels.
            tiles: Its input.
            output: Where its output is to be.
            pool: Of another graph; None: there is none.
        """
        self._tiles, self._output = tiles.clone(), output
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(tiles.device)
        default = torch.cuda.current_stream(tiles.device)
        stream.wait_stream(default)
        with torch.cuda.stream(stream):
            # Of this thread: others prepare scans meanwhile.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._output.copy_(run(self._tiles))
            finally:
                self._graph.capture_end()
        default.wait_stream(stream)
        self.pool = self._graph.pool()

    def __call__(self, tiles: Tensor) -> Tensor:
        """Run the pass on other tiles."""
        self._tiles.copy_(tiles)
        self._graph.replay()
        return self._output.clone()
