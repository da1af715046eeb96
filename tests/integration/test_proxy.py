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

from app.cli.client import Client
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
    """Return the server of the documentation without TLS, on other ports, and under its path."""
    text = DEPLOYMENT.read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```nginx\n(.*?)```", text, re.DOTALL)
    server = re.sub(r"^ *ssl_.*\n", "", blocks[0], flags=re.MULTILINE)
    assert "listen 443 ssl;" in server
    assert "127.0.0.1:8000;" in server
    first = "    location / {\n        proxy_pass http://127.0.0.1:8000;\n"
    head, rest = server.split(first)
    server = head + first + rest.removesuffix("}\n") + blocks[1] + rest
    server = server.replace("127.0.0.1:8000", f"127.0.0.1:{service}")
    return server.replace("443 ssl", f"127.0.0.1:{port}")


def accepts(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("proxied")
    jobs = str(folder / "jobs")
    with ended(Faulty(faulty_models(folder), ALLOWED_HOSTS=NAME, JOBS=jobs)) as process:
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


def test_links_are_those_of_the_path_under_which_the_proxy_serves(client: httpx.Client) -> None:
    link = client.post("/landmarks/v1/jobs", content=command_scan()).headers["location"]
    assert link.startswith("/landmarks/v1/jobs/")
    until(lambda: client.get(link).json()["state"] == "finished")
    (scan,) = client.get(link).json()["scans"]
    assert len(client.get(scan["result"]).json()["landmarks"]) == 3
    with Client(str(client.base_url.join("/landmarks"))) as user:
        assert user.wait(user.submit(command_scan()).id).done == 1


def test_calls_are_described_under_the_path_of_the_proxy(client: httpx.Client) -> None:
    assert 'src="page/swagger-ui.js"' in client.get("/landmarks/docs").text
    described = client.get("/landmarks/openapi.json")
    assert f"http://{NAME}/landmarks/v1/landmarks?" in described.json()["info"]["description"]
    (server,) = described.json()["servers"]
    assert str(described.url.join(server["url"]).path) == "/landmarks/"


def test_scheme_of_the_proxy_is_told_to_the_service() -> None:
    """Else its description has addresses of http, to which nothing can be sent behind TLS."""
    told = "proxy_set_header X-Forwarded-Proto $scheme;"
    assert documented(1, 2).count(told) == 2  # At / and below a path.


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
