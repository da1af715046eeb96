"""The client, with servers that are not landmarkd."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from typer.testing import CliRunner

from app.cli.client import Client, ProblemError, Unreachable
from app.cli.main import app
from app.io import correct, read_truth
from app.io.schemas import Problem
from tests.support.answers import make_answer
from tests.support.services import MODEL, ServiceProcess, toy_models, toy_scan

HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
ANSWER = make_answer(["1"], np.zeros((1, 3)))
PROBLEM = (
    Problem(type="x", title="Busy", status=429, detail="later", code="queue-full", request_id="r")
    .model_dump_json()
    .encode()
)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Run a server with one answer to all requests; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status", [200, 302, 404, 502])
@pytest.mark.parametrize("body", [HTML, b"", b"{}"])
def test_answer_of_another_server_is_unreachable(status: int, body: bytes) -> None:
    with answering(status, body) as url, Client(url) as client:
        keep = partial(client.keep, b"x", ANSWER)
        detect = partial(client.detect, b"x")
        for call in (detect, keep, client.models, client.readiness):
            with pytest.raises(Unreachable, match=f"HTTP status {status}"):
                call()


def test_problem_is_raised_with_its_details() -> None:
    with answering(429, PROBLEM) as url, Client(url) as client:
        with pytest.raises(ProblemError, match="Busy: later") as caught:
            client.detect(b"x")
        assert caught.value.problem.code == "queue-full"


def test_folder_is_finished_behind_a_broken_proxy(tmp_path: Path) -> None:
    scans = tmp_path / "scans"
    scans.mkdir()
    for name in ("one", "two"):
        (scans / f"{name}.nii").write_bytes(toy_scan())
    with answering(502, HTML) as url:
        words = ["detect", str(scans), "-o", str(tmp_path / "out"), "--url", url]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    for name in ("one", "two"):
        assert f"{name}.nii: expected a service" in result.stderr
    assert "HTTP status 502" in result.stderr


def test_a_scan_is_sent_from_its_path(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    models, scan = toy_models(tmp_path / "models"), tmp_path / "scan.nii"
    scan.write_bytes(toy_scan())
    service = ServiceProcess(models)
    try:
        with Client(service.url) as client:
            assert client.detect(scan).landmarks == client.detect(scan.read_bytes()).landmarks
            with pytest.raises(FileNotFoundError):
                client.detect(tmp_path / "none.nii")
    finally:
        service.kill()


def test_corrected_case_is_kept_and_one_of_another_scan_refused(tmp_path: Path) -> None:
    scan, store = tmp_path / "scan.nii", tmp_path / "store"
    scan.write_bytes(toy_scan())
    service = ServiceProcess(toy_models(tmp_path), STORE=str(store))
    try:
        with Client(service.url) as client:
            corrected = correct(client.detect(scan), {"1": (2.0, 5.0, 8.0), "2": None})
            case = client.keep(scan, corrected)
            with pytest.raises(ProblemError, match="digest"):
                client.keep(toy_scan((12, 14, 16)), corrected)
    finally:
        service.kill()
    assert (case.placed, case.absent, case.accepted) == (1, 1, 0)
    truth = read_truth(store / MODEL / "landmarks" / f"{case.id}.mrk.json")
    assert truth["1"] is not None
    assert_allclose(truth["1"], (2.0, 5.0, 8.0))
    assert truth["2"] is None
