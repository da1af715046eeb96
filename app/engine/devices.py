"""The devices of a process, and which of them runs a request.

Each has an event-loop side, a thread and batch sizes of its own, and a copy of every model. An
unhealthy one gets no work until it has recovered; the others go on.
"""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from app.compute import NamedDevice, memory_headroom
from app.engine.batch_sizes import BatchSizes
from app.engine.device_loop import DeviceLoop
from app.engine.host_pool import start_daemon_thread
from app.engine.metrics import Metrics
from app.errors import ModelRefused, NotReady
from app.model import LoadedModel


class Devices:
    """The devices.

    Attributes:
        loops: One for each device; its position is the device's index.
    """

    def __init__(
        self,
        named: tuple[NamedDevice, ...],
        batch_size: int,
        metrics: Metrics,
        self_check: Callable[[int], None],
        on_lost: Callable[[], None],
    ) -> None:
        """Create the loops, none of which has started.

        Args:
            named: The devices.
            batch_size: Maximum number of tiles in a batch; 0: as measured, on each by itself.
            metrics: To count in.
            self_check: Raises if a model does not answer as it should on the device of an index;
                called on its thread.
            on_lost: Called if no device can be used any more.
        """
        self._on_lost = on_lost
        self.loops = tuple(
            DeviceLoop(
                BatchSizes(batch_size, partial(memory_headroom, one.device)),
                metrics,
                partial(self_check, index),
                self._on_device_lost,
                one,
                index,
            )
            for index, one in enumerate(named)
        )
        self._watch(metrics)

    def _watch(self, metrics: Metrics) -> None:
        """Add the gauges of the metrics."""
        loops = self.loops
        metrics.watch(
            "queue_tiles",
            "Tiles that wait for a device.",
            lambda: sum(loop.queue.waiting_tiles for loop in loops),
        )
        metrics.watch(
            "scans_preparing",
            "Scans that are resampled, or wait for that; they have no tiles yet.",
            lambda: sum(loop.queue.unprepared for loop in loops),
        )
        metrics.watch(
            "queue_age_seconds",
            "Of the oldest scan in work.",
            lambda: max(loop.oldest_s for loop in loops),
        )
        sizes = {loop.device.name: partial(getattr, loop.sizes, "largest") for loop in loops}
        metrics.watch("batch_size", "Most tiles in a forward pass now.", sizes)

    def start(self) -> None:
        """Start all threads; raises as ``DeviceLoop.start``."""
        for loop in self.loops:
            loop.start()

    async def stop(self) -> None:
        """End all threads; whoever still waits gets an error."""
        await asyncio.gather(*(loop.stop() for loop in self.loops))

    def load(self, load_on: Callable[..., LoadedModel]) -> LoadedModel:
        """Load a model on every device that is not lost, side by side, in threads of their own.

        Args:
            load_on: Loads it on a ``torch.device``; its argument ``on_device`` is an ``OnDevice``.

        Raises:
            ModelRefused: It is refused on one of them, or its folder changed meanwhile.
            NotReady: All are lost.
        """
        futures = {
            loop: start_daemon_thread(partial(load_on, loop.device.device, on_device=loop.call))
            for loop in self.loops
            if not loop.lost
        }
        results = {loop.index: self._result(loop, future) for loop, future in futures.items()}
        copies = {index: copy for index, copy in results.items() if copy is not None}
        if not copies:
            raise NotReady("expected a working device, but all are lost")
        first = next(iter(copies.values()))
        if any(copy.digest != first.digest for copy in copies.values()):
            raise ModelRefused(f"{first.manifest.name}: expected a folder that stays as it is")
        return first if len(self.loops) == 1 else replace(first, copies=copies)

    def _result(self, loop: DeviceLoop, future: Future[LoadedModel]) -> LoadedModel | None:
        """Wait for a device's copy; None if the device is lost meanwhile."""
        try:
            return future.result()
        except NotReady:
            if not loop.lost:
                raise
            return None
        except ModelRefused as refusal:
            if len(self.loops) == 1:
                raise
            raise ModelRefused(f"{refusal} (on {loop.device.name})") from refusal

    def choose(self, key: Hashable) -> DeviceLoop:
        """Choose the device of a request by its key.

        Returns:
            The one where an equal request is in work already, else the one that is free first.

        Raises:
            NotReady: All are unhealthy.
        """
        healthy = self._healthy
        if not healthy:
            raise NotReady(f"expected a working device, but {self.unhealthy_reason}")
        same = [loop for loop in healthy if loop.has_scan(key)]
        return min(same or healthy, key=lambda loop: loop.load)

    def estimate_latency_s(self, lane: Hashable, tiles: int, client: str = "") -> float:
        """Estimate how long a client's new scan would take; 0 where its lane was not timed."""
        healthy = self._healthy
        if not all(loop.sizes.is_measured(lane) for loop in healthy):
            return 0.0
        latencies = (loop.queue.estimate_latency_s(lane, tiles, client) for loop in healthy)
        return min(latencies, default=0.0)

    @property
    def healthy_count(self) -> int:
        """Number of healthy devices."""
        return len(self._healthy)

    @property
    def backlog_s(self) -> float:
        """Estimated time until the first device has run the tiles that wait now."""
        return min((loop.queue.backlog_s for loop in self._healthy), default=0.0)

    @property
    def unhealthy_reason(self) -> str | None:
        """Which devices are unhealthy, and why; None if all are healthy."""
        if len(self.loops) == 1:
            return self.loops[0].unhealthy_reason
        unhealthy = [loop for loop in self.loops if loop.unhealthy_reason is not None]
        reasons = (f"{loop.device.name}: {loop.unhealthy_reason}" for loop in unhealthy)
        return "; ".join(reasons) or None

    @property
    def _healthy(self) -> list[DeviceLoop]:
        return [loop for loop in self.loops if loop.unhealthy_reason is None]

    def _on_device_lost(self) -> None:
        if all(loop.lost for loop in self.loops):
            self._on_lost()
