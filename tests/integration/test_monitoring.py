"""The files for Prometheus and Grafana agree with the metrics of the service."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric

from app.api.request_log import PROBES
from app.engine import Metrics
from tests.benchmarks.servers import free_port
from tests.support.metrics_page import METRICS_PAGE, collect_metrics, metrics_page
from tests.support.services import (
    RAW,
    ServiceProcess,
    running,
    toy_models,
    toy_scan,
    toy_settings,
)

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
DASHBOARD = FOLDER / "grafana" / "landmarkd.json"
PART = re.compile(r"_(?:bucket|sum|count|total)$")
NAME = re.compile(r"\b(?:landmarkd|process)_[a-z_]+\b")
SELECTORS = re.compile(r"\b((?:landmarkd|process)_[a-z_]+)\{([^}]*)\}")
GROUPINGS = re.compile(r"\bby \(([^)]*)\)")
PROMETHEUS_LABELS = {"instance", "job"}
"""Labels that Prometheus adds."""

RARE_LEGENDS = {"cancelled", "shared", "device seconds", "{{kind}}"}
"""Legends of counters that have no samples before their first event."""


def expressions() -> list[tuple[str, str]]:
    """List the expressions of the dashboard, each with its legend, and of the alerts."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [
        (target["legendFormat"], target["expr"].replace("$__rate_interval", "1m"))
        for panel in panels
        for target in panel["targets"]
    ]
    rules = (FOLDER / "alerts.yml").read_text()
    alerts = re.findall(r"expr:(?: \|)?((?:.|\n)*?)\n +(?:for|labels):", rules)
    return found + [("alert", expression) for expression in alerts]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> list[Metric]:
    return collect_metrics(tmp_path_factory.mktemp("monitoring"))


@pytest.fixture(scope="module")
def metrics_with_labels(metrics: list[Metric]) -> dict[str, set[str]]:
    """Collect names and labels of all samples."""
    labels: dict[str, set[str]] = {}
    for family in metrics:
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_metrics_page_is_what_a_service_tells(metrics: list[Metric]) -> None:
    page = METRICS_PAGE.read_text("utf-8")
    assert page == metrics_page(metrics), "run python -m tests.support.metrics_page"


def test_panels_and_alerts_query_existing_metrics(
    metrics_with_labels: dict[str, set[str]],
) -> None:
    assert len(expressions()) > 20
    for _, expression in expressions():
        names = set(NAME.findall(expression))
        assert names or expression.strip().startswith("up{"), expression
        assert names <= metrics_with_labels.keys()
        for name, selectors in SELECTORS.findall(expression):
            for label in re.findall(r"(\w+)\s*[=!]~?", selectors):
                assert label in metrics_with_labels[name] | PROMETHEUS_LABELS, (name, label)
        known = PROMETHEUS_LABELS.union(*(metrics_with_labels[name] for name in names))
        for group in GROUPINGS.findall(expression):
            assert set(re.split(r",\s*", group)) <= known, expression


def test_alerts_count_codes_that_calls_are_answered_with() -> None:
    """One that no call is answered with would never fire."""
    answered = (FOLDER.parents[1] / "docs" / "http.md").read_text(encoding="utf-8")
    found = re.findall(r'code=~"([^"]+)"', (FOLDER / "alerts.yml").read_text())
    assert len(found) == 4
    codes = [code for some in found for code in some.split("|")]
    assert [code for code in codes if f"`{code}`" not in answered] == []


def test_faults_and_failures_of_jobs_are_counted_from_0_on() -> None:
    """A counter that first shows up at 1 has not increased, and fires no alert."""
    sources = [path.read_text("utf-8") for path in (FOLDER.parents[1] / "app").rglob("*.py")]
    kinds = set(re.findall(r'faults\.labels\("([^"]+)"\)', "".join(sources)))
    assert len(kinds) == 4
    rule = re.search(r'job_scans_total\{code=~"([^"]+)"', (FOLDER / "alerts.yml").read_text())
    assert rule is not None
    new = Metrics().render().decode()
    for kind in kinds:
        assert f'landmarkd_faults_total{{kind="{kind}"}} 0.0\n' in new
    for code in rule[1].split("|"):
        assert f'landmarkd_job_scans_total{{code="{code}"}} 0.0\n' in new


def test_requests_that_alerts_watch_are_counted_from_0_on(tmp_path: Path) -> None:
    rules = re.findall(r'requests_total\{code=~"([^"]+)"', (FOLDER / "alerts.yml").read_text())
    codes = {code for rule in rules for code in rule.split("|")}
    assert len(codes) == 7
    with running(toy_settings(toy_models(tmp_path))) as client:
        described = client.get("/openapi.json").json()["paths"]
        new = client.get("/metrics").text
    for route in described.keys() - {*PROBES}:
        for code in codes:
            assert f'landmarkd_requests_total{{code="{code}",route="{route}"}} 0.0\n' in new


OUTAGES: dict[str, tuple[dict[str, str], set[str]]] = {
    "a job waits while requests come first": (
        {
            "landmarkd_queue_age_seconds": "0+10x180",
            "landmarkd_tiles_total": "0+5x180",
        },
        set(),
    ),
    "a device hangs, and requests are given up": (
        {
            "landmarkd_queue_age_seconds": " ".join(["1 11 21 31 41 51"] * 30),
            "landmarkd_tiles_total": "0+5x60 300x120",
        },
        {"LandmarkdStuck"},
    ),
    "one scan is given up, and nobody sends another": (
        {
            "landmarkd_queue_age_seconds": "0x120 1 11 21 31 41 51 0x60",
            "landmarkd_tiles_total": "9x200",
        },
        set(),
    ),
    "nobody sends scans": (
        {
            "landmarkd_queue_age_seconds": "1 11 21 31 41 0x175",
            "landmarkd_tiles_total": "0 0 0 0 9 9x175",
        },
        set(),
    ),
    "three requests an hour, and all of them fail": (
        {'landmarkd_requests_total{code="internal"}': "1x60 2x119 3"},
        {"LandmarkdFailingSlowly"},
    ),
    "a device hangs, and three requests an hour are given up": (
        {
            "landmarkd_queue_age_seconds": "0x60 1 11 21 31 41 51 0x120",
            "landmarkd_tiles_total": "9x200",
            'landmarkd_requests_total{code="ok"}': "9x200",
            'landmarkd_requests_total{code="deadline-exceeded"}': "1x66 2x119",
        },
        {"LandmarkdFailingSlowly"},
    ),
    "a client asks while the service starts": (
        {
            'landmarkd_requests_total{code="ok"}': "0+10x180",
            'landmarkd_requests_total{code="not-ready"}': "0x60 5 9x119",
        },
        set(),
    ),
    "scans of jobs wait for room on the disk, or for a model that is not loaded": (
        {
            "landmarkd_job_scans_queued": "0x30 2x150",
            'landmarkd_job_scans_total{code="ok"}': "4x180",
            'landmarkd_job_scans_total{code="internal"}': "0x180",
        },
        {"LandmarkdJobsWaiting"},
    ),
    "the first scans of jobs wait, and none of any job was ever settled": (
        {"landmarkd_job_scans_queued": "0x30 2x150"},
        {"LandmarkdJobsWaiting"},
    ),
    "many scans of jobs wait for each other": (
        {
            "landmarkd_job_scans_queued": "60-0.2x180",
            'landmarkd_job_scans_total{code="ok"}': "0+0.2x180",
            'landmarkd_job_scans_total{code="internal"}': "0x180",
        },
        set(),
    ),
    "requests fail while a client reads kept problems": (
        {
            'landmarkd_requests_total{code="ok"}': "0+10x180",
            'landmarkd_requests_total{code="internal"}': "0+1x180",
            'landmarkd_requests_total{code="kept-problem"}': "0+1000x180",
        },
        {"LandmarkdFailing"},
    ),
}
"""Samples of metrics, each ten seconds for half an hour, and the alerts that fire then."""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs prometheus")
@pytest.mark.parametrize("outage", OUTAGES)
def test_alerts_fire_for_what_somebody_has_to_mend(outage: str, tmp_path: Path) -> None:
    samples, firing = OUTAGES[outage]
    series = [{"series": name, "values": values} for name, values in samples.items()]
    alerts = re.findall(r"alert: (\w+)", (FOLDER / "alerts.yml").read_text())
    assert firing < set(alerts)
    test = {
        "rule_files": [str(FOLDER / "alerts.yml")],
        "evaluation_interval": "10s",
        "tests": [
            {
                "interval": "10s",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
                        "eval_time": "25m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if name in firing else [],
                    }
                    for name in alerts
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(json.dumps(test))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_mounted_files_exist_and_name_one_datasource() -> None:
    mounted = re.findall(r"- \./(\S+?):/", (FOLDER / "compose.yml").read_text())
    assert len(mounted) == 4
    for path in mounted:
        assert (FOLDER.parents[1] / path).exists(), path
    source = FOLDER / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (uid,) = re.findall(r"uid: (\w+)", source.read_text())
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {uid}


def test_every_metric_is_on_the_dashboard(metrics_with_labels: dict[str, set[str]]) -> None:
    shown, there = (
        {PART.sub("", name) for name in names if not name.endswith("_created")}
        for names in (NAME.findall(DASHBOARD.read_text()), metrics_with_labels)
    )
    assert {name for name in there - shown if name.startswith("landmarkd_")} == set()


@contextmanager
def prometheus(folder: Path, service: ServiceProcess) -> Iterator[httpx.Client]:
    """Run Prometheus with the deployed files, except for address and scrape interval."""
    config = (FOLDER / "prometheus.yml").read_text()
    config = config.replace("landmarkd:8000", f"127.0.0.1:{service.port}").replace("10s", "1s")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(FOLDER / "alerts.yml", folder)
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        transport = httpx.HTTPTransport(retries=10)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}/api/v1", transport=transport
        ) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def ask(client: httpx.Client, expression: str) -> list[object]:
    """Evaluate an expression; return the series."""
    answer = client.get("/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    result: list[object] = answer["data"]["result"]
    return result


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
def test_prometheus_reads_the_deployed_files_and_every_panel_has_data(tmp_path: Path) -> None:
    service = ServiceProcess(toy_models(tmp_path), JOBS=str(tmp_path / "jobs"))
    try:
        with prometheus(tmp_path, service) as client:
            httpx.post(f"{service.url}/v1/jobs", content=toy_scan(), headers=RAW)
            end = time.monotonic() + 30
            while len(ask(client, "count_over_time(landmarkd_ready[1m]) >= 5")) == 0:
                httpx.post(f"{service.url}/v1/landmarks", content=toy_scan(), headers=RAW)
                assert time.monotonic() < end
            for legend, expression in expressions():
                found = ask(client, expression.replace("$instance", ".*"))
                if legend == "alert":
                    assert not found, expression
                elif not any(legend.startswith(quiet) for quiet in RARE_LEGENDS):
                    assert found, expression
            (group,) = client.get("/rules").json()["data"]["groups"]
            assert [rule["health"] for rule in group["rules"]] == ["ok"] * 9
    finally:
        service.terminate()
        assert service.wait() == 0
