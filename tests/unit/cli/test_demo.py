"""The demo of ``make run``: a generated scan answered by the service."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from app.cli.client import Client, Unreachable
from app.cli.demo import landmark_table, start_demo
from app.io import ModelsAnswer
from app.phantom import make_phantom, scan_bytes
from tests.support.services import ServiceProcess

MODELS = Path(__file__).resolve().parents[3] / "models"
ABSENT_RING = 6


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    process = ServiceProcess(MODELS)
    yield process
    process.kill()


def shown(url: str) -> str:
    text = io.StringIO()
    start_demo(url, Console(file=text, width=200)).join(timeout=200)
    return text.getvalue()


def test_demo_shows_landmarks_errors_and_the_next_command(service: ServiceProcess) -> None:
    text = shown(service.url)
    for word in ("ball", "error mm", "truly absent", "mouse-skull", "curl --data-binary"):
        assert word in text
    assert service.url in text


def test_no_proxy_is_asked_for_a_service_of_this_machine(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("127.0.0.1", "localhost"):
        with Client(service.url.replace("127.0.0.1", name)) as client:
            assert client.readiness().ready
    client = Client("http://scans.example")
    with client, pytest.raises(Unreachable, match="refused"):
        client.readiness()


def test_table_distinguishes_errors_from_misses(service: ServiceProcess) -> None:
    phantom = make_phantom(ABSENT_RING)
    with Client(service.url) as client:
        answer = client.detect(scan_bytes(phantom), model="phantom")
    moved = answer.model_copy(
        update={
            "landmarks": [
                mark.model_copy(update={"ras_mm": None, "status": "not_found"})
                if mark.name == "ball"
                else mark
                for mark in answer.landmarks
            ]
        }
    )
    text = io.StringIO()
    Console(file=text, width=200).print(landmark_table(moved, phantom))
    rows = {line.split()[1]: line for line in text.getvalue().splitlines() if line.startswith("│")}
    assert "missed" in rows["ball"]
    assert "truly absent" in rows["ring"]
    assert float(rows["shell"].split()[-2]) < 2.0


def test_demo_reports_a_refusal_of_its_scan() -> None:
    service = ServiceProcess(MODELS, API_KEYS="0" * 64)
    try:
        assert "was not answered" in shown(service.url)
    finally:
        service.kill()


def test_demo_reports_a_service_that_ends_meanwhile(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at Ctrl-C: its thread ended in a traceback."""

    def end(_: Client) -> ModelsAnswer:
        raise Unreachable("it has ended")

    monkeypatch.setattr(Client, "models", end)
    assert "was not answered: it has ended" in shown(service.url)


@pytest.mark.parametrize(("setting", "start"), [("json", "{"), ("", "2")])
def test_demo_logs_as_the_setting_says_and_else_as_text(setting: str, start: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve", "--demo", "--port", "0"],
        env={"LANDMARKD_MODELS_DIR": str(MODELS), "LANDMARKD_LOG_FORMAT": setting},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.kill()
    assert line.startswith(start)
