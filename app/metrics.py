"""What happens in the service -> Prometheus metrics, one registry per application."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Final, Literal, cast

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from app.detector import StageTimes

Stage = Literal["receive", "decode", "prepare", "queue", "network", "vote", "locate"]

METRICS_MEDIA_TYPE: Final = CONTENT_TYPE_LATEST
# From a tile on a fast device to a whole body on a slow CPU, about three buckets per decade.
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TILES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
VOXELS: Final = (1e4, 1e5, 1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9)


class Metrics:
    """The service's counters and histograms."""

    def __init__(self) -> None:
        """Make all of them, at zero, in a registry of their own."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("requests", "Requests by outcome.", "route", "code")
        self._latency = self._histogram(
            "request_seconds", "Head of the request to end of the answer.", SECONDS, "route"
        )
        self._stages = self._histogram(
            "stage_seconds", "Time of one request in one stage.", SECONDS, "stage"
        )
        self._batches = self._histogram("batch_tiles", "Tiles in a forward pass.", TILES)
        self._voxels = self._histogram("volume_voxels", "Voxels of a decoded volume.", VOXELS)
        self._faults = self._counter("faults", "Faults that were survived, by kind.", "kind")
        self._ready = Gauge(
            "landmarkd_ready", "1 if new requests are accepted.", registry=self.registry
        )
        self._depth = Gauge(
            "landmarkd_queue_tiles", "Tiles that wait for the device.", registry=self.registry
        )
        self._in_flight = Gauge(
            "landmarkd_requests_in_flight", "Requests accepted, unanswered.", registry=self.registry
        )

    def observe_request(self, route: str, code: str, seconds: float) -> None:
        """Count a request that was answered.

        Args:
            route: The route's template, never the path that came.
            code: ``ok`` or the problem's code.
            seconds: From the request's head to the end of the answer.
        """
        self._requests.labels(route, code).inc()
        self._latency.labels(route).observe(seconds)

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        """Note the time that one request spent in one stage."""
        self._stages.labels(stage).observe(seconds)

    def observe_stages(self, times: StageTimes) -> None:
        """Note the time that one request spent in each of the engine's stages."""
        for stage, milliseconds in asdict(times).items():
            self.observe_stage(cast("Stage", stage), milliseconds / 1e3)

    def observe_batch(self, size: int) -> None:
        """Note how many tiles one forward pass took."""
        self._batches.observe(size)

    def observe_volume(self, voxels: int) -> None:
        """Note the size of a decoded volume."""
        self._voxels.observe(voxels)

    def count_fault(self, kind: str) -> None:
        """Count a fault that the engine survived, such as ``batch``: a batch that failed."""
        self._faults.labels(kind).inc()

    def watch(
        self,
        *,
        queue_depth: Callable[[], float],
        in_flight: Callable[[], float],
        ready: Callable[[], bool],
    ) -> None:
        """Read the gauges from these functions whenever the metrics are asked for."""
        self._depth.set_function(queue_depth)
        self._in_flight.set_function(in_flight)
        self._ready.set_function(lambda: float(ready()))

    def render(self) -> bytes:
        """Write all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"landmarkd_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"landmarkd_{name}", text, labels, buckets=buckets, registry=self.registry)
