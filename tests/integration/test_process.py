"""The service as a process: real sockets, real signals, exit codes."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.io.schemas import LandmarksAnswer, Problem
from app.settings import PREFIX
from tests.support.documents import ROOT
from tests.support.services import (
    RAW,
    SERVE,
    FreshService,
    ServiceProcess,
    toy_models,
    toy_scan,
)

URL = "/v1/landmarks"
SHORT_S = "0.5"
LARGE = (100, 64, 80)
"""Of float32: 2 MB, of which all but the start is received in place."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("process"))


@pytest.fixture(scope="module")
def service(models: Path) -> Iterator[ServiceProcess]:
    process = FreshService(
        models, BODY_TIMEOUT_S=SHORT_S, HEADER_TIMEOUT_S=SHORT_S, MAX_BODY_BYTES="4MiB"
    )
    yield process
    process.kill()


def connect(service: ServiceProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=60)


def head(length: int, request_id: str) -> bytes:
    return (
        f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: {request_id}\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


def read_all(connection: socket.socket) -> bytes:
    content = b""
    while chunk := connection.recv(65_536):
        content += chunk
    return content


def test_upload_over_a_socket_is_answered(service: ServiceProcess) -> None:
    response = httpx.post(service.url + URL, content=toy_scan(), headers=RAW, timeout=60)
    assert response.status_code == 200
    assert LandmarksAnswer.model_validate_json(response.content).landmarks


def test_large_uploads_arrive_as_a_chunked_one_does(service: ServiceProcess) -> None:
    scan = toy_scan(LARGE)

    def digest(content: bytes | Iterator[bytes]) -> str | None:
        response = httpx.post(service.url + URL, content=content, headers=RAW, timeout=60)
        return LandmarksAnswer.model_validate_json(response.content).volume.digest

    expected = digest(iter([scan[:99], scan[99:]]))
    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(digest, [scan] * 4)) == [expected] * 4


def test_large_body_that_stalls_gets_408_with_its_size(service: ServiceProcess) -> None:
    scan = toy_scan(LARGE)
    with connect(service) as connection:
        connection.sendall(head(len(scan), "stops") + scan[:700_000])
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"got 700000 bytes" in answer


def test_large_body_is_refused_by_its_header_while_it_arrives(service: ServiceProcess) -> None:
    frames = toy_scan((*LARGE[:2], 8, 9))
    with connect(service) as connection:
        connection.sendall(head(len(frames), "frames") + frames[:100_000])
        assert read_all(connection).startswith(b"HTTP/1.1 422")


def test_disconnect_during_a_large_body_is_logged(service: ServiceProcess) -> None:
    scan = toy_scan(LARGE)
    with connect(service) as connection:
        connection.sendall(head(len(scan), "left-large") + scan[:700_000])
    assert service.wait_for(request_id="left-large")["code"] == "client-left"


def test_slow_body_gets_408(service: ServiceProcess) -> None:
    with connect(service) as connection:
        connection.sendall(head(1000, "slow") + b"x")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert Problem.model_validate_json(answer.split(b"\r\n\r\n", 1)[1]).code == "slow-upload"


def test_body_that_stalls_on_the_page_gets_408(service: ServiceProcess) -> None:
    with connect(service) as connection:
        connection.sendall(head(1000, "stalled").replace(URL.encode(), b"/page/landmarks") + b"{")
        assert read_all(connection).startswith(b"HTTP/1.1 408")


def test_disconnect_during_a_body_of_the_page_is_logged_as_such(service: ServiceProcess) -> None:
    with connect(service) as connection:
        connection.sendall(head(1000, "page-left").replace(URL.encode(), b"/page/landmarks") + b"{")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line = service.wait_for(request_id="page-left")
    assert (line["status"], line["code"], line["level"]) == (499, "client-left", "info")


def test_page_of_another_site_is_refused(service: ServiceProcess) -> None:
    headers = {"Host": "evil.example:8000"}, {"Sec-Fetch-Site": "cross-site"}
    for header in headers:
        response = httpx.post(service.url + URL, content=b"x", headers=RAW | header, timeout=60)
        assert response.status_code == 403
        assert Problem.model_validate_json(response.content).code == "forbidden"


def test_connection_with_an_endless_head_is_closed(service: ServiceProcess) -> None:
    with connect(service) as connection:
        connection.sendall(b"POST /v1/landmarks HTTP/1.1\r\nHost: localhost\r\n")
        assert read_all(connection) == b""


def test_connection_of_a_refused_body_is_closed(service: ServiceProcess) -> None:
    with connect(service) as connection:
        connection.sendall(head(10 << 20, "big").replace(b"Connection: close\r\n", b"") + b"x")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")


def test_client_that_expects_100_is_refused_before_it_sends(service: ServiceProcess) -> None:
    with connect(service) as connection:
        expecting = head(10 << 20, "expecting").replace(b"Host", b"Expect: 100-continue\r\nHost")
        connection.sendall(expecting)
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_disconnect_during_an_upload_is_logged(service: ServiceProcess) -> None:
    with connect(service) as connection:
        connection.sendall(head(1000, "left-early") + b"x")
    assert service.wait_for(request_id="left-early")["code"] == "client-left"
    text = httpx.get(service.url + "/metrics", timeout=60).text
    assert "landmarkd_requests_in_flight 0.0" in text


def test_disconnect_during_the_work_harms_no_other_request(service: ServiceProcess) -> None:
    scan = toy_scan()
    with connect(service) as connection:
        connection.sendall(head(len(scan), "left-late") + scan)
    # A fast machine may have answered before it could see the client leave.
    assert service.wait_for(request_id="left-late")["code"] in ("client-left", "ok")
    response = httpx.post(service.url + URL, content=scan, headers=RAW, timeout=60)
    assert response.status_code == 200


def test_log_that_is_not_read_holds_nothing_up(models: Path) -> None:
    service = FreshService(models)
    try:
        service.stop_reading()
        # At 200 bytes a line, more than a pipe of 64 KiB holds.
        with httpx.Client(base_url=service.url, timeout=20) as client:
            for _ in range(1000):
                assert client.get("/livez").status_code == 200
            assert "landmarkd_log_lines_dropped_total 0.0" in client.get("/metrics").text
        start = time.monotonic()
        service.terminate()
        assert service.wait() == 0
        assert time.monotonic() - start < 15
    finally:
        service.kill()


JAVA = """\
import java.net.URI;
import java.net.http.*;
import java.nio.file.Path;

public class Upload {
  public static void main(String[] args) throws Exception {
    var body = HttpRequest.BodyPublishers.ofFile(Path.of(args[1]));
    var request = HttpRequest.newBuilder(URI.create(args[0])).POST(body).build();
    var answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
    System.out.print(answer.statusCode());
  }
}
"""


@pytest.mark.parametrize("shape", [(20, 18, 24), LARGE], ids=["small", "large"])
@pytest.mark.parametrize("client", ["curl", "java"])
def test_clients_that_offer_http_2_are_answered(
    client: str, shape: tuple[int, ...], service: ServiceProcess, tmp_path: Path
) -> None:
    if shutil.which(client) is None:
        pytest.skip(f"needs {client}")
    scan, source = tmp_path / "scan.nii", tmp_path / "Upload.java"
    scan.write_bytes(toy_scan(shape))
    source.write_text(JAVA)
    url = service.url + URL
    saved = str(tmp_path / "answer")
    commands = {
        "curl": ["--http2", "-sSw", "%{http_code}", "-o", saved, "--data-binary", f"@{scan}", url],
        "java": [str(source), url, str(scan)],
    }
    command = [client, *commands[client]]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert answer.stdout == "200"


def test_sigterm_refuses_bodies_that_still_arrive_and_exits_0_at_once(models: Path) -> None:
    service = FreshService(models, DRAIN_S="30")
    scan = toy_scan(LARGE)
    chunked = head(1, "chunked").replace(b"Content-Length: 1", b"Transfer-Encoding: chunked")
    form = chunked.replace(b"Host", b"Content-Type: multipart/form-data; boundary=b\r\nHost")
    begun = (head(len(scan), "direct") + scan[:700_000], chunked + b"1\r\na\r\n", form)
    start = time.monotonic()
    idle = connect(service)
    idle.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert idle.recv(65_536).startswith(b"HTTP/1.1 200")
    try:
        with ExitStack() as stack:
            connections = [stack.enter_context(connect(service)) for _ in begun]
            for connection, sent in zip(connections, begun, strict=True):
                connection.sendall(sent)
            # In flight: the first line of the metrics that says so.
            while (
                "requests_in_flight 3.0" not in httpx.get(service.url + "/metrics", timeout=60).text
            ):
                pass
            service.terminate()
            answers = [read_all(connection) for connection in connections]
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"connection: close" in answer
            assert Problem.model_validate_json(answer.split(b"\r\n\r\n", 1)[1]).code == "draining"
        assert service.wait() == 0
        assert time.monotonic() - start < 15
    finally:
        idle.close()
        service.kill()


SAY_WHEN_ENABLED_AND_AT_THE_END = """
import atexit, functools, gc, json, sys
say = functools.partial(print, file=sys.stderr, flush=True)
gc.disable()
enable = gc.enable

def enable_and_say():
    enable()
    spared = gc.get_freeze_count() > 100_000
    say(json.dumps({"message": "", "on": gc.isenabled(), "spared": spared}))

gc.enable = enable_and_say
atexit.register(say, '{"message": "at the end"}')
"""


def test_garbage_collection_spares_what_the_start_has_made_and_nothing_is_written_after_the_log(
    models: Path,
) -> None:
    service = FreshService(models, SAY_WHEN_ENABLED_AND_AT_THE_END)
    try:
        service.wait_for(on=True, spared=True)
        service.terminate()
        service.wait_for(message=f"Finished server process [{service.pid}]")
        with pytest.raises(AssertionError, match=r"got the end \(exit code 0\)"):
            service.wait_for(message="at the end")
    finally:
        service.kill()


def test_neither_a_start_nor_a_scan_imports_computer_algebra(models: Path) -> None:
    # Some of torch's functions import sympy, which takes a second, as does torchvision, which MONAI
    # imports where it is installed.
    before = "import sys\nsys.modules['sympy'] = sys.modules['torchvision'] = None"
    service = FreshService(models, before)
    try:
        response = httpx.post(service.url + URL, content=toy_scan(), headers=RAW, timeout=60)
        assert response.status_code == 200, response.text
    finally:
        service.kill()


def start_in_vain(**settings: str) -> tuple["subprocess.CompletedProcess[str]", list[Any]]:
    """Run a service that ends by itself; returns what it wrote, too, line by line."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        env={f"{PREFIX}{name}": value for name, value in ({"PORT": "0"} | settings).items()},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done, [json.loads(line) for line in done.stderr.splitlines()]


def test_start_without_models_says_what_is_missing(tmp_path: Path) -> None:
    done, lines = start_in_vain(MODELS_DIR=str(tmp_path / "nowhere"))
    assert done.returncode == 1
    (failure,) = [line for line in lines if line["level"] == "error"]
    assert "expected a folder of models, 'nowhere' is none" in failure["reason"]
    assert str(tmp_path) not in done.stderr


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda:99", "expected a CUDA device cuda:99, got a machine with"),
        ("cpu,cpu", "expected every device once, got cpu, cpu"),
    ],
)
def test_start_without_the_device_says_which_is_missing(
    models: Path, device: str, reason: str
) -> None:
    done, lines = start_in_vain(MODELS_DIR=str(models), DEVICE=device)
    assert done.returncode != 0
    (said,) = [line["reason"] for line in lines if line["message"] == "cannot start"]
    assert said.startswith(reason)
    assert "Traceback" not in done.stderr


def test_default_model_that_is_not_loaded_is_logged(models: Path) -> None:
    """Nobody who sends a scan has asked for it."""
    service = ServiceProcess(models, DEFAULT_MODEL="nope")
    try:
        line = service.wait_for(message="no default model")
    finally:
        service.kill()
    assert "nope" in line["reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_model_is_fine_for_a_user_whom_the_machine_does_not_know() -> None:
    """As in a container that is run with --user: no name, and no home."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            # Files are read as root, because nobody else may read Python in root's own folder.
            "import os; os.setreuid(54321, 0); from app.cli.main import main; main()",
            "check",
            ROOT / "models" / "phantom",
        ],
        cwd=ROOT,
        env={"NUMBA_CACHE_DIR": str(ROOT / "app" / "__pycache__")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
