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
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor

logger = logging.getLogger("landmarkd.model")

MAX_VOXELS: Final = 1 << 20
"""Of a pass that is captured. Larger ones keep the device busy for longer than their launches take,
and their intermediate results would hold gigabytes."""

USES: Final = 3
"""Passes of a shape before it is captured: capturing takes as long as a few of them."""

MAX_SHAPES: Final = 32
"""Shapes that are known; with one more, all graphs are let go of, as they share their memory."""

HIGH_PRIORITY: Final = -1
"""Of the stream that captures. Torch has few streams, and gives the same one several times, but not
to those of another priority: what another thread does on it would become part of the graph."""

Pool: TypeAlias = tuple[int, int]
"""What torch names memory by that only graphs use."""

Run: TypeAlias = Callable[[Float[Tensor, "n 1 i j k"]], Float[Tensor, "n ..."]]


class CudaGraphs:
    """The graphs of one network, which share the memory of their intermediate results.

    That is sound as they never run at once: all are replayed on the device's default stream.
    """

    def __init__(self, run: Run) -> None:
        """Run passes by a function that launches their kernels."""
        self._run = run
        self._gave_up = False
        # One pass at a time: replays of a graph share its input, and all of them the output.
        self._lock = threading.Lock()
        self._graphs: dict[tuple[int, ...], _CudaGraph] = {}
        self._let_go()
        _all.add(self)

    def __call__(self, tiles: Float[Tensor, "n 1 i j k"]) -> Float[Tensor, "n ..."]:
        """Run a pass; raises what the function does.

        Args:
            tiles: As for the function, on a CUDA device.

        Returns:
            What the function returns, in memory of its own.
        """
        device, shape = tiles.device, tuple(tiles.shape)
        on_default = torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
        if self._gave_up or tiles.numel() > MAX_VOXELS or not on_default:
            return self._run(tiles)
        with self._lock:
            if graph := self._graphs.get(shape):
                return graph(tiles)
            output = self._run(tiles)
            self._uses[shape] += 1
            if len(self._uses) > MAX_SHAPES:
                self._let_go()
            elif self._uses[shape] >= USES:
                self._capture(tiles, output)
            return output

    def clear(self) -> bool:
        """Let go of all graphs and their memory; says whether there were any."""
        with self._lock:
            return self._let_go()

    def _let_go(self) -> bool:
        had_any = bool(self._graphs)
        self._graphs = {}
        self._uses = Counter[tuple[int, ...]]()
        self._output: Tensor | None = None
        self._pool: Pool | None = None
        return had_any

    def _capture(self, tiles: Tensor, output: Tensor) -> None:
        """Capture a pass of which the output is known."""
        extent = 1 + sum((n - 1) * s for n, s in zip(output.shape, output.stride(), strict=True))
        if self._output is not None and len(self._output) < extent:
            self._let_go()
        try:
            if self._output is None:
                self._output, self._pool = output.new_empty(extent), torch.cuda.graph_pool_handle()
            target = self._output.as_strided(output.shape, output.stride())
            graph = _CudaGraph(self._run, tiles, target, self._pool)
            # Values that are not numbers do not equal themselves.
            if torch.equal(graph(tiles).nan_to_num_(), output.nan_to_num()):
                self._graphs[tuple(tiles.shape)] = graph
                return
            reason = "it gave other values"
        except Exception as error:  # noqa: BLE001 - the pass has its answer, by its kernels
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if self._pool is not None:
                _leave_capture(tiles.device, self._pool)
        self._gave_up = True
        self._let_go()
        extra = {"shape": list(tiles.shape), "reason": reason}
        logger.warning("forward passes are not captured as CUDA graphs", extra=extra)


_all: Final = WeakSet[CudaGraphs]()


def release_graphs() -> bool:
    """Let go of the graphs of all networks; says whether there were any, which held memory."""
    return sum(graphs.clear() for graphs in tuple(_all)) > 0


def _leave_capture(device: torch.device, pool: Pool) -> None:
    """End what ``capture_end`` leaves undone of a capture that failed, in some versions of torch.

    Its generator of random numbers believes that it is being captured, and its allocator, which
    then returns no more memory that two streams have used.
    """
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    end_allocations = vars(torch._C)["_cuda_endAllocateToPool"]  # noqa: SLF001 - as torch.cuda.use_mem_pool does
    with suppress(RuntimeError):  # Another version has ended them.
        end_allocations(device.index, pool)


class _CudaGraph:
    """A pass over tiles of one shape."""

    def __init__(self, run: Run, tiles: Tensor, output: Tensor, pool: Pool | None) -> None:
        """Capture a pass that has run before, so that all its kernels are loaded.

        Args:
            run: Launches its kernels.
            tiles: Its input.
            output: Where its output is to be.
            pool: Memory of its intermediate results.
        """
        self._tiles, self._output = tiles.clone(), output
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(tiles.device, HIGH_PRIORITY)
        default = torch.cuda.current_stream(tiles.device)
        stream.wait_stream(default)
        with torch.cuda.stream(stream):
            # Of this thread alone: others prepare scans meanwhile.
            handle: Any = pool
            self._graph.capture_begin(handle, "thread_local")
            try:
                self._output.copy_(run(self._tiles))
            finally:
                self._graph.capture_end()
        default.wait_stream(stream)

    def __call__(self, tiles: Tensor) -> Tensor:
        """Run the pass on other tiles."""
        self._tiles.copy_(tiles)
        self._graph.replay()
        return self._output.clone()
