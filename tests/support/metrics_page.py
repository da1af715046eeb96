"""Writes docs/metrics.md from a service's metrics: ``python -m tests.support.metrics_page``."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from app.server.log_writer import LogWriter
from tests.support.services import RAW, running, shared_of, toy_models, toy_scan, toy_settings

METRICS_PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

INTRODUCTION: Final = """\
# Metrics

`/metrics` tells these, in the Prometheus format. Counters begin at 0 when the service starts; those
with labels have no sample before their first event, but for the faults, and failures of requests
and jobs, that alerts watch. A histogram has samples that end in `_bucket`, `_sum` and `_count`;
samples that end in `_created` say since when it, or a counter, counts. Those of jobs and uploads
are there where `LANDMARKD_JOBS` is set. [Deployment](deployment.md#monitoring) has Prometheus,
alerts and a dashboard for them, and says what some mean for an operator.

This page is generated from a running service by `python -m tests.support.metrics_page`; do not edit
it.

| metric | type | labels | what it tells |
|---|---|---|---|
"""


def collect_metrics(folder: Path) -> list[Metric]:
    """Return the metrics of a service that keeps jobs, and has answered and refused a scan."""
    with running(toy_settings(toy_models(folder), jobs=folder / "jobs")) as client:
        assert client.post("/v1/landmarks", content=toy_scan(), headers=RAW).is_success
        assert client.post("/v1/landmarks", content=b"no scan", headers=RAW).is_client_error
        # Counters with labels have no samples before their first event, but for those of alerts.
        metrics = shared_of(client).metrics
        metrics.count_dropped("late", 0.1)
        log = LogWriter()
        metrics.registry.register(log)
        text = client.get("/metrics").text
        log.close()
    # Each counter and histogram has another that tells when it began.
    found = text_string_to_metric_families(text)
    return [metric for metric in found if not metric.name.endswith("_created")]


def metrics_page(metrics: Iterable[Metric]) -> str:
    """Write the page: one table row for each metric, by its name."""
    return INTRODUCTION + "".join(sorted(map(_row, metrics)))


def _row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
    told = ", ".join(f"`{label}`" for label in sorted(labels)) or "none"
    return f"| `{name}` | {metric.type} | {told} | {metric.documentation} |\n"


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        METRICS_PAGE.write_text(metrics_page(collect_metrics(Path(folder))), encoding="utf-8")
