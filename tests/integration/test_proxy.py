"""Behind a real nginx, set as docs/deployment.md has it: large scans, events, early refusals."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from app.settings import Settings
from tests.benchmarks.servers import free_port
from tests.support.faulty_network import command_scan, faulty_models
from tests.support.faulty_service import Faulty
from tests.support.services import RAW, ended, until

NGINX: Final = shutil.which("nginx")
NAME: Final = "scans.example"
DEPLOYMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"
SETTINGS: Final = """
daemon off; user root; pid {folder}/pid; error_log {folder}/errors warn;
events {{}}
http {{
    access_log off; client_body_temp_path {folder}/bodies; proxy_temp_path {folder}/answers;
    {server}
}}
"""

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx")


def documented(port: int, service: int) -> str:
    """Return the server of the documentation without TLS, on other ports."""
    found = re.search(r"```nginx\n(.*?)```", DEPLOYMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    server = re.sub(r"^ *ssl_.*\n", "", found[1], flags=re.MULTILINE)
    assert "listen 443 ssl;" in server
    assert "127.0.0.1:8000;" in server
    server = server.replace("127.0.0.1:8000", f"127.0.0.1:{service}")
    return server.replace("443 ssl", f"127.0.0.1:{port}")


def accepts(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    models = faulty_models(tmp_path_factory.mktemp("proxied"))
    with ended(Faulty(models, ALLOWED_HOSTS=NAME)) as process:
        yield process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nginx")


@pytest.fixture(scope="module")
def client(service: Faulty, folder: Path) -> Iterator[httpx.Client]:
    assert NGINX is not None
    port, settings = free_port(), folder / "nginx.conf"
    settings.write_text(SETTINGS.format(folder=folder, server=documented(port, service.port)))
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(settings)])
    try:
        until(lambda: accepts(port))
        headers = RAW | {"Host": NAME}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as one:
            yield one
    finally:
        process.terminate()
        process.wait(30)


def test_scan_of_many_megabytes_is_answered_and_kept_on_no_disk(
    client: httpx.Client, folder: Path
) -> None:
    scan = command_scan(shape=(100, 100, 150))
    assert len(scan) > 5_000_000
    answer = client.post("/v1/landmarks", content=scan)
    assert answer.status_code == 200, answer.text
    assert "buffered to a temporary file" not in (folder / "errors").read_text()


def test_events_are_passed_on_while_a_scan_waits(client: httpx.Client, service: Faulty) -> None:
    accept = {"Accept": "text/event-stream"}
    with (
        service.held(),
        client.stream("POST", "/v1/landmarks", content=command_scan(), headers=accept) as answer,
    ):
        assert next(answer.iter_lines()) == "event: progress"


@pytest.mark.parametrize("size", [100_000, 5_000_000, 60_000_000])
def test_refusal_is_passed_on_while_the_body_is_sent(client: httpx.Client, size: int) -> None:
    """Not as an error of the proxy's own, though the service does not want the rest."""
    answer = client.post("/v1/landmarks", content=b"no scan " * (size // 8))
    assert (answer.status_code, answer.json()["code"]) == (400, "not-a-volume")


def test_limits_of_the_proxy_are_beyond_those_of_the_service() -> None:
    text, settings = documented(1, 2), Settings()
    size = re.search(r"client_max_body_size (\d+)m;", text)
    time_s = re.search(r"proxy_read_timeout (\d+)s;", text)
    assert size is not None
    assert int(size[1]) << 20 == settings.max_body_bytes
    assert time_s is not None
    assert int(time_s[1]) > settings.max_timeout_s


def test_other_names_are_refused_by_the_service(client: httpx.Client) -> None:
    answer = client.get("/v1/models", headers={"Host": "other.example"})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
