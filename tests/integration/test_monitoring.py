"""What Prometheus and Grafana are given: all that the service tells, and nothing else."""

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
from prometheus_client.parser import text_string_to_metric_families

from tests.benchmarks.servers import free_port
from tests.support.services import (
    RAW,
    ServiceProcess,
    running,
    shared_of,
    toy_models,
    toy_scan,
    toy_settings,
)

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
DASHBOARD = FOLDER / "grafana" / "landmarkd.json"
NAME = re.compile(r"\b(?:landmarkd|process)_[a-z_]+\b")
SELECTED = re.compile(r"\b((?:landmarkd|process)_[a-z_]+)\{([^}]*)\}")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
GIVEN = {"instance", "job"}
"""Labels that Prometheus adds."""

QUIET = {"given up", "shared", "device seconds", "{{kind}}"}
"""Legends of what is counted only once it has happened."""


def expressions() -> list[tuple[str, str]]:
    """List what the dashboard asks for, each with its legend, and what the alerts do."""
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
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Ask a service that has answered one scan and refused another: samples and their labels."""
    models = toy_models(tmp_path_factory.mktemp("monitoring"))
    with running(toy_settings(models)) as client:
        assert client.post("/v1/landmarks", content=toy_scan(), headers=RAW).is_success
        assert client.post("/v1/landmarks", content=b"no scan", headers=RAW).is_client_error
        # What a service seldom does: a counter with labels tells them only once it has counted.
        metrics = shared_of(client).metrics
        metrics.count_faults("tile", 1)
        metrics.count_dropped("late", 0.1)
        text = client.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_no_panel_or_alert_asks_for_what_the_service_does_not_tell(
    told: dict[str, set[str]],
) -> None:
    assert len(expressions()) > 20
    for _, expression in expressions():
        names = set(NAME.findall(expression))
        assert names or expression.strip().startswith("up{"), expression
        assert names <= told.keys()
        for name, selectors in SELECTED.findall(expression):
            for label in re.findall(r"(\w+)\s*[=!]~?", selectors):
                assert label in told[name] | GIVEN, (name, label)
        known = GIVEN.union(*(told[name] for name in names))
        for group in GROUPED.findall(expression):
            assert set(re.split(r",\s*", group)) <= known, expression


def test_what_the_containers_are_given_is_there_and_of_one_name() -> None:
    mounted = re.findall(r"- \./(\S+?):/", (FOLDER / "compose.yml").read_text())
    assert len(mounted) == 4
    for path in mounted:
        assert (FOLDER.parents[1] / path).exists(), path
    source = FOLDER / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (uid,) = re.findall(r"uid: (\w+)", source.read_text())
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {uid}


def test_all_that_the_service_tells_is_shown(told: dict[str, set[str]]) -> None:
    shown = set(NAME.findall(DASHBOARD.read_text()))
    for name in told:
        if name.startswith("landmarkd_") and not name.endswith("_created"):
            family = re.sub(r"_(?:bucket|sum|count|total)$", "", name)
            assert any(other.startswith(family) for other in shown), name


@contextmanager
def prometheus(folder: Path, service: ServiceProcess) -> Iterator[httpx.Client]:
    """Run Prometheus on the files that are deployed, but for the address and a shorter interval."""
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
    """Evaluate an expression; gives what it finds."""
    answer = client.get("/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    result: list[object] = answer["data"]["result"]
    return result


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
def test_prometheus_reads_what_is_deployed_and_every_panel_shows_something(tmp_path: Path) -> None:
    service = ServiceProcess(toy_models(tmp_path))
    try:
        with prometheus(tmp_path, service) as client:
            end = time.monotonic() + 30
            while len(ask(client, "count_over_time(landmarkd_ready[1m]) >= 5")) == 0:
                httpx.post(f"{service.url}/v1/landmarks", content=toy_scan(), headers=RAW)
                assert time.monotonic() < end
            for legend, expression in expressions():
                found = ask(client, expression.replace("$instance", ".*"))
                if legend == "alert":
                    assert not found, expression
                elif not any(legend.startswith(quiet) for quiet in QUIET):
                    assert found, expression
            (group,) = client.get("/rules").json()["data"]["groups"]
            assert [rule["health"] for rule in group["rules"]] == ["ok"] * 6
    finally:
        service.terminate()
        assert service.wait() == 0
