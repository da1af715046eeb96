"""Where the service is started: terminals that close, and standard streams that are closed."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from app.settings import PREFIX
from tests.support.documents import ROOT
from tests.support.services import ServiceProcess, toy_models, until


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("terminals"))


def test_terminal_that_closes_drains_the_service(models: Path) -> None:
    # Whatever started the tests may ignore the signal, as nohup does.
    service = ServiceProcess(models, "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)")
    os.kill(service.pid, signal.SIGHUP)
    service.wait_for(message="draining", signal="SIGHUP")
    assert service.wait() == 0


def test_service_that_nohup_starts_outlives_its_terminal(models: Path) -> None:
    service = ServiceProcess(models, "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    os.kill(service.pid, signal.SIGHUP)
    service.terminate()
    service.wait_for(message="draining", signal="SIGTERM")
    assert service.wait() == 0


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_service_without_standard_streams_serves(closed: str, models: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    settings = {"MODELS_DIR": str(models), "DEVICE": "cpu", "THREADS": "1", "PORT": port}
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "app.cli", "serve"],
        cwd=ROOT,
        env=os.environ | {PREFIX + name: value for name, value in settings.items()},
    )
    try:
        until(lambda: process.poll() is not None or is_ready(port))
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def is_ready(port: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz").is_success
    return False
