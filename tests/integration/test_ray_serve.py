"""The application on Ray Serve: a real Ray on this machine, two replicas on the CPU."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.io.schemas import LandmarksAnswer
from tests.benchmarks.linux import family_of, is_running
from tests.benchmarks.servers import (
    ONE_REPLICA,
    TWO_REPLICAS,
    Server,
    check_same,
    replica_processes,
    replicas_of,
    serving,
)
from tests.benchmarks.surroundings import ROOT
from tests.support.services import (
    MODEL,
    RAW,
    problem_of,
    running,
    toy_models,
    toy_scan,
    toy_settings,
)

pytestmark = [
    pytest.mark.skipif(not TWO_REPLICAS.installed, reason="ray is not installed"),
    pytest.mark.timeout(120),
]

KEY = "open-sesame"
KEYS = hashlib.sha256(KEY.encode()).hexdigest()
HEADERS = RAW | {"Authorization": f"Bearer {KEY}"}
URL = "/v1/landmarks"
EVERY_ADDRESS = str(IPv4Address(0))
"""As the image sets it, though the address is the proxy's."""

LARGE = (100, 64, 80)
"""Of float32: 2 MB, which Serve passes on in many chunks."""


CHECK = """
import sys, pathlib, yaml
from ray.serve.schema import ServeDeploySchema
from app.server.ray_serve import Scale
from app.settings import Settings
longest_s = Settings().body_timeout_s + Settings().max_timeout_s
for name in sys.argv[1:]:
    given = yaml.safe_load(pathlib.Path(name).read_text())
    given = yaml.safe_load(given["spec"]["serveConfigV2"]) if "spec" in given else given
    deployed = ServeDeploySchema.model_validate(given)
    assert deployed.http_options.request_timeout_s > longest_s
    (application,) = deployed.applications
    assert application.import_path == "app.server.ray_serve:application"
    Scale(**application.args)
"""
"""In a process of its own, because importing Ray warns."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    limits = {"MAX_BODY_BYTES": "4MiB", "MAX_IN_FLIGHT": "2", "DRAIN_S": "20"}
    model = models / MODEL
    with serving(TWO_REPLICAS, model, THREADS="1", API_KEYS=KEYS, **limits) as started:
        while len(replicas_of(started, HEADERS)) < 2:
            pass
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    url = f"http://127.0.0.1:{server.port}"
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as opened:
        yield opened


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def head(length: int, name: str = "raw") -> bytes:
    lines = [f"POST {URL} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}"]
    lines += [f"X-Request-ID: {name}", f"Content-Length: {length}", "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    content = b""
    while chunk := connection.recv(65_536):
        content += chunk
    return content


def metrics_have(client: httpx.Client, *words: str) -> bool:
    """Return whether the replica that answers has a sample with all of these words."""
    lines = client.get("/metrics").text.splitlines()
    return any(all(word in line for word in words) for line in lines)


def without_id(problem: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in problem.items() if key != "request_id"}


def test_config_files_are_valid_for_serve_and_the_application() -> None:
    files = [str(ROOT / "deploy" / "ray" / name) for name in ("serve.yaml", "kuberay.yaml")]
    subprocess.run([sys.executable, "-c", CHECK, *files], cwd=ROOT, check=True)


# Before the others start their server, so that there is one at a time.
@pytest.mark.timeout(300)
def test_service_without_keys_answers_its_own_machine_and_no_page_of_another_site(
    models: Path,
) -> None:
    scan = toy_scan()
    with serving(ONE_REPLICA, models / MODEL, THREADS="1", HOST=EVERY_ADDRESS) as started:
        url = f"http://127.0.0.1:{started.port}{URL}"
        for host in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000"):
            assert httpx.post(url, content=scan, headers=RAW | {"Host": host}).is_success, host
        for header in ({"Host": "evil.example:8000"}, {"Sec-Fetch-Site": "cross-site"}):
            refused = httpx.post(url, content=scan, headers=RAW | header, timeout=60)
            assert problem_of(refused).code == "forbidden", header


def test_every_replica_answers_as_the_service_without_ray(
    models: Path, client: httpx.Client
) -> None:
    scan = toy_scan(LARGE)
    with running(toy_settings(models)) as plain:
        expected = plain.post(URL, content=scan, headers=RAW).content
    seen: set[str] = set()
    while len(seen) < 2:
        response = client.post(URL, content=scan)
        assert response.status_code == 200
        check_same(response.content, expected, "without Ray")
        digests = {
            LandmarksAnswer.model_validate_json(answer).volume.digest
            for answer in (response.content, expected)
        }
        assert len(digests) == 1
        seen.add(response.headers["X-Replica"])


def test_bad_request_gets_the_problem_that_it_gets_without_ray(
    models: Path, client: httpx.Client
) -> None:
    with running(toy_settings(models)) as plain:
        expected = plain.post(URL, content=b"no scan", headers=RAW)
    response = client.post(URL, content=b"no scan")
    assert problem_of(response).code == "not-a-volume"
    assert without_id(response.json()) == without_id(expected.json())


def test_answer_has_the_id_of_its_request_once(client: httpx.Client) -> None:
    response = client.get("/livez", headers={"X-Request-ID": "mine"})
    assert response.headers.get_list("X-Request-ID") == ["mine"]


def test_call_without_a_key_is_refused_before_its_body_arrives(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(head(1_000_000).replace(KEY.encode(), b"wrong"))
        assert connection.recv(65_536).startswith(b"HTTP/1.1 401")


def test_metrics_need_a_key_and_tell_of_lines_that_the_log_has_dropped(
    client: httpx.Client,
) -> None:
    refused = client.get("/metrics", headers={"Authorization": "Bearer wrong"})
    assert problem_of(refused).code == "unauthorized"
    assert metrics_have(client, "log_lines_dropped_total{replica=", "} 0.0")


def test_body_over_the_limit_is_refused_before_it_arrives(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(head(10 << 20) + b"x")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 413")


def test_requests_over_the_limit_of_all_replicas_get_429(
    server: Server, client: httpx.Client
) -> None:
    scan = toy_scan()
    with ExitStack() as held:
        while (response := client.post(URL, content=scan)).is_success:
            connection = held.enter_context(connect(server))
            connection.sendall(head(len(scan)) + scan[:100])
    assert problem_of(response).code == "queue-full"
    assert int(response.headers["Retry-After"]) > 0


def test_progress_is_sent_as_events(client: httpx.Client) -> None:
    accept = {"Accept": "text/event-stream"}
    with client.stream("POST", URL, content=toy_scan(), headers=accept) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        names = [line for line in response.iter_lines() if line.startswith("event: ")]
    assert names[0] == "event: progress"
    assert names[-1] == "event: answer"


def test_request_that_cannot_meet_its_deadline_gets_504(client: httpx.Client) -> None:
    response = client.post(URL, params={"timeout_s": 1e-6}, content=toy_scan())
    assert problem_of(response).code == "deadline-exceeded"


def test_disconnect_is_counted_and_frees_its_slot(server: Server, client: httpx.Client) -> None:
    with connect(server) as connection:
        connection.sendall(head(1000) + b"x")
        while not metrics_have(client, "requests_in_flight{", "1.0"):
            pass
    while not metrics_have(client, "requests_total{", 'code="client-left"'):
        pass
    while not metrics_have(client, "requests_in_flight{", "0.0"):
        pass


def test_service_survives_a_killed_replica(server: Server, client: httpx.Client) -> None:
    before = replicas_of(server, HEADERS)
    victim, *_ = replica_processes(server)
    os.kill(victim, signal.SIGKILL)
    # Requests on the way to it are lost; later ones are answered by the other replica.
    while client.post(URL, content=toy_scan()).status_code != 200:
        pass
    while len(replicas_of(server, HEADERS) - before) < 1:
        pass
    assert [client.post(URL, content=toy_scan()).status_code for _ in range(8)] == [200] * 8


# Last, because it stops the server.
def test_stop_answers_accepted_requests_and_leaves_no_process(
    server: Server, client: httpx.Client
) -> None:
    scan = toy_scan(LARGE)
    family = family_of(server.process)
    with connect(server) as connection:
        connection.sendall(head(len(scan)) + scan[:100])
        while not metrics_have(client, "requests_in_flight{", "1.0"):
            pass
        os.kill(server.process, signal.SIGTERM)
        connection.sendall(scan[100:])
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    while any(is_running(member) for member in family):
        pass
