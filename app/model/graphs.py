"""Tiles -> output, as CUDA graphs: one launch instead of one for each of a network's kernels.

The host takes longer to launch the kernels of a small pass than the device to run them, and holds
Python's global lock meanwhile. So a pass over tiles of a shape that comes again is captured as a
graph and replayed from then on. When it is captured, it must give the same bits as its kernels one
by one. If it does not, or cannot be captured, its network runs as it did.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

logger = logging.getLogger("landmarkd.model")

MAX_VOXELS: Final = 1 << 19
"""Of a pass that is captured. Larger ones keep the device busy for longer than their launches take,
and graphs keep the memory of their intermediate results."""

USES: Final = 3
"""Passes of a shape before it is captured: capturing takes as long as a few of them."""

MAX_SHAPES: Final = 16
"""Shapes that are known; with one more, all graphs are let go of, as they share their memory."""

HIGH_PRIORITY: Final = -1
"""Of the stream that captures. Torch has few streams, and gives the same one several times, but not
to those of another priority: what another thread does on it would become part of the graph."""

Run: TypeAlias = Callable[[Float[Tensor, "n 1 i j k"]], Float[Tensor, "n ..."]]

_captures: Final = threading.Lock()
"""Held to capture a graph and to let go of some: torch registers them with one generator of random
numbers for each device."""


class CudaGraphs:
    """The graphs of one network, which share the memory of their intermediate results.

    That is sound as they never run at once: all are replayed on the device's default stream.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._gave_up = False
        # One pass at a time: replays of a graph share its input, and all of them the output.
        self._lock = threading.Lock()
        self._uses = Counter[tuple[int, ...]]()
        self._graphs: dict[tuple[int, ...], _CudaGraph] = {}
        self._shared: _Shared | None = None

    @torch.inference_mode()
    def __call__(self, run: Run, tiles: Float[Tensor, "n 1 i j k"]) -> Float[Tensor, "n ..."]:
        """Run a pass; raises what the function does.

        Args:
            run: Launches the kernels of the network, always the same one.
            tiles: As for the function, on a CUDA device.

        Returns:
            What the function returns, in memory of its own.
        """
        device, shape = tiles.device, tuple(tiles.shape)
        on_default = torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
        if self._gave_up or tiles.numel() > MAX_VOXELS or not on_default:
            return run(tiles)
        with self._lock:
            if graph := self._graphs.get(shape):
                return graph(tiles)
            output = run(tiles)
            self._uses[shape] += 1
            if len(self._uses) > MAX_SHAPES:
                self._let_go(device)
            elif self._uses[shape] >= USES:
                self._capture(run, tiles, output)
            return output

    def _let_go(self, device: torch.device) -> None:
        """Let go of all graphs and their memory, once the last replay is done."""
        torch.cuda.default_stream(device).synchronize()
        with _captures:
            self._uses.clear()
            self._graphs.clear()
            self._shared = None

    def _capture(self, run: Run, tiles: Tensor, output: Tensor) -> None:
        """Capture a pass of which the output is known."""
        if self._shared is not None and not self._shared.holds(output):
            self._let_go(tiles.device)
        try:
            self._shared = self._shared or _Shared(output)
            with _captures:
                graph = _CudaGraph(run, tiles, output, self._shared)
            # Values that are not numbers do not equal themselves.
            if torch.equal(graph(tiles).nan_to_num_(), output.nan_to_num()):
                self._graphs[tuple(tiles.shape)] = graph
                return
            reason = "it gave other values"
        except Exception as error:  # noqa: BLE001 - the pass has its answer, by its kernels
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._gave_up = True
        self._let_go(tiles.device)
        extra = {"shape": list(tiles.shape), "reason": reason}
        logger.warning("forward passes are not captured as CUDA graphs", extra=extra)


class _Shared:
    """What the graphs of a network share.

    Attributes:
        output: Memory of their outputs.
        pool: What torch names the memory of their intermediate results by.
        stream: On which they are captured: torch gives memory again to the same stream only.
    """

    def __init__(self, output: Tensor) -> None:
        """Allocate memory for outputs like one that is known."""
        self.output = output.new_empty(_extent(output))
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(output.device, HIGH_PRIORITY)

    def holds(self, output: Tensor) -> bool:
        """Say whether an output fits the memory."""
        return _extent(output) <= len(self.output)


class _CudaGraph:
    """A pass over tiles of one shape."""

    def __init__(self, run: Run, tiles: Tensor, output: Tensor, shared: _Shared) -> None:
        """Capture a pass that has run before, so that all its kernels are loaded.

        Args:
            run: Launches its kernels.
            tiles: Its input.
            output: What it gave.
            shared: With the other graphs.
        """
        self._tiles = tiles.clone()
        self._output = shared.output.as_strided(output.shape, output.stride())
        self._graph = torch.cuda.CUDAGraph()
        default = torch.cuda.current_stream(tiles.device)
        shared.stream.wait_stream(default)
        try:
            with torch.cuda.stream(shared.stream):
                # Of this thread alone: others prepare scans meanwhile.
                self._graph.capture_begin(shared.pool, "thread_local")
                try:
                    self._output.copy_(run(self._tiles))
                finally:
                    self._graph.capture_end()
        except BaseException:
            _leave_capture(tiles.device, shared)
            raise
        default.wait_stream(shared.stream)

    def __call__(self, tiles: Tensor) -> Tensor:
        """Run the pass on other tiles."""
        self._tiles.copy_(tiles)
        self._graph.replay()
        return self._output.clone()


def _leave_capture(device: torch.device, shared: _Shared) -> None:
    """End what ``capture_end`` leaves undone of a capture that failed, in some versions of torch.

    Its generator of random numbers believes that it is being captured, and its allocator, which
    then returns no more memory that two streams have used.
    """
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    end_allocations = vars(torch._C)["_cuda_endAllocateToPool"]  # noqa: SLF001 - as torch.cuda.use_mem_pool does
    with suppress(RuntimeError):  # Another version has ended them.
        end_allocations(device.index, shared.pool)


def _extent(values: Tensor) -> int:
    """Count the numbers in memory from the first to the last of some values."""
    return 1 + sum((n - 1) * s for n, s in zip(values.shape, values.stride(), strict=True))
