"""Prometheus metrics of one application, in a registry of its own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import product
from typing import Final, Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.registry import Collector

from app.inference import StageTimes

METRICS_MEDIA_TYPE: Final = CONTENT_TYPE_LATEST
# From a tile on a fast device to a whole body on a slow CPU, about three buckets per decade.
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TILES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
SHARES: Final = (0.125, 0.25, 0.5, 0.75, 1)
SIZES: Final = (1, 8, 64)
"""Upper limits of small, medium and large scans, in tiles."""
FAULTS: Final = ("out-of-memory", "tile", "self-check", "thread")
FAILURES: Final = ("internal", "network-failed", "does-not-fit", "given-up")
"""Kinds of faults, and codes of scans of jobs that fail because of the service. They are counted
from 0 on: of a counter that first shows up at 1, Prometheus sees no increase, and alerts nobody."""
WATCHED: Final = (
    "internal", "network-failed", "does-not-fit", "not-ready", "not-stored", "queue-full",
    "deadline-exceeded",
)  # fmt: skip
"""Codes of requests that alerts watch; likewise, for each route."""
DROPPED: Final = ("cancelled", "late")
VOXELS: Final = (1e4, 1e5, 1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9)


class Metrics:
    """The service's counters and histograms; those without an underscore are counted in directly.

    Args:
        routes: Templates of the routes of which requests are expected.

    Attributes:
        registry: All of them.
        shown: What ``render`` writes: the registry, unless that is to be labelled.
    """

    def __init__(self, routes: Iterable[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self.shown: Collector = self.registry
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("requests", "Requests by outcome.", "route", "code")
        self._latency = self._histogram(
            "request_seconds", "Head of the request to end of the answer.", SECONDS, "route"
        )
        self.stages = self._histogram(
            "stage_seconds", "Time of one request in one stage.", SECONDS, "stage"
        )
        self._batches = self._histogram("batch_tiles", "Tiles in a forward pass.", TILES)
        self._fill = self._histogram(
            "batch_fill", "Tiles in a forward pass, of those that it could hold.", SHARES
        )
        self._tiles = self._counter("tiles", "Tiles that were run.")
        self.busy = self._counter("device_busy_seconds", "Time a device was at work.", "device")
        self._waits = self._histogram(
            "wait_seconds", "Time a scan waited for the device, by its tiles.", SECONDS, "tiles"
        )
        self.shared = self._counter("shared", "Requests answered by another's computation.")
        self._dropped = self._counter(
            "dropped", "Scans that were given up because nobody waited any more.", "why"
        )
        self._saved = self._counter("saved_seconds", "Device time saved by tiles not run.")
        self.voxels = self._histogram("volume_voxels", "Voxels of a decoded volume.", VOXELS)
        self.faults = self._counter("faults", "Faults that were survived, by kind.", "kind")
        self.job_scans = self._counter("job_scans", "Scans of jobs by outcome.", "code")
        for kind in FAULTS:
            self.faults.labels(kind)
        for code in FAILURES:
            self.job_scans.labels(code)
        for why in DROPPED:
            self._dropped.labels(why)
        for route, code in product(routes, WATCHED):
            self._requests.labels(route, code)

    def observe_request(self, route: str, code: str, seconds: float) -> None:
        """Record a request that was answered.

        Args:
            route: The route's template, never the path of the request.
            code: ``ok``, ``kept-problem`` or the problem's code.
            seconds: From the request's head to the end of the answer.
        """
        self._requests.labels(route, code).inc()
        self._latency.labels(route).observe(seconds)

    def observe_stages(self, times: StageTimes) -> None:
        """Record the time that one request spent in each of the engine's stages."""
        for stage, milliseconds in asdict(times).items():
            self.stages.labels(stage).observe(milliseconds / 1e3)

    def observe_batch(self, size: int, capacity: int) -> None:
        """Record how many tiles one forward pass had, and how many it could have had."""
        self._batches.observe(size)
        self._fill.observe(size / max(size, capacity))
        self._tiles.inc(size)

    def observe_wait(self, tiles: int, seconds: float) -> None:
        """Record how long a scan of so many tiles has waited for the device."""
        limit = next((edge for edge in SIZES if tiles <= edge), None)
        self._waits.labels("more" if limit is None else f"{limit}").observe(seconds)

    def count_dropped(self, why: Literal["cancelled", "late"], saved_s: float) -> None:
        """Count a scan that nobody waits for any more, and the device time that it saves."""
        self._dropped.labels(why).inc()
        self._saved.inc(saved_s)

    def watch(
        self,
        name: str,
        text: str,
        read: Callable[[], float] | Mapping[str, Callable[[], float]],
        label: str = "device",
    ) -> None:
        """Add a gauge, read by a function whenever the metrics are rendered.

        Args:
            name: Of the gauge, without ``landmarkd_``.
            text: Its help.
            read: Returns its value; or one such function for each value of the label.
            label: Name of that label.
        """
        if isinstance(read, Mapping):
            gauge = Gauge(f"landmarkd_{name}", text, (label,), registry=self.registry)
            for value, one in read.items():
                gauge.labels(value).set_function(one)
        else:
            Gauge(f"landmarkd_{name}", text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """Write all metrics in the Prometheus text format."""
        return generate_latest(self.shown)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"landmarkd_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"landmarkd_{name}", text, labels, buckets=buckets, registry=self.registry)
