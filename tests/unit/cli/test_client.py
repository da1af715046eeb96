"""The client, with servers that are not landmarkd."""

import math
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
from blake3 import blake3
from numpy.testing import assert_allclose
from typer.testing import CliRunner

from app.cli import client as clients
from app.cli.client import Client, ProblemError, Unreachable
from app.cli.main import app
from app.errors import BrokenVolume, NotAVolume, TooLarge
from app.io import correct, read_truth
from app.io.schemas import JobsAnswer, JobSummary, Problem
from app.jobs.uploads import MAX_OPEN_OF_ONE
from tests.support.answers import make_answer
from tests.support.dicom_files import as_dicom, zipped
from tests.support.services import MODEL, ServiceProcess, toy_models, toy_scan

HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
ANSWER = make_answer(["1"], np.zeros((1, 3)))
JOB = JobSummary(
    id="x", state="queued", model="skull", created=datetime.now(UTC), expires=None, total=1, done=0,
    failed=0,
)  # fmt: skip
PROBLEM = (
    Problem(type="x", title="Busy", status=429, detail="later", code="queue-full", request_id="r")
    .model_dump_json()
    .encode()
)


@contextmanager
def answering(status: int, body: bytes, second: bytes | None = None) -> Iterator[str]:
    """Run a server with one answer, or another to what has ``after``; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = second if second and "?after=" in self.path else body
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_DELETE = do_GET  # noqa: N815 - names of the library

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
        keep, detect = partial(client.keep, b"x", ANSWER), partial(client.detect, b"x")
        calls: list[Callable[[], object]] = [detect, keep, client.models, client.readiness]
        calls += [partial(client.submit, b"x"), partial(client.result, "job"), client.jobs]
        calls += [partial(client.remove, "job")] * (status != 200)
        for call in calls:
            with pytest.raises(Unreachable, match=f"HTTP status {status}"):
                call()


@pytest.mark.timeout(20)
def test_jobs_are_listed_whole_however_many_parts_the_list_has() -> None:
    parts = (JobsAnswer(jobs=[JOB], next=after).model_dump_json() for after in ("1.5-x", None))
    with answering(200, *(part.encode() for part in parts)) as url, Client(url) as client:
        assert client.jobs() == JobsAnswer(jobs=[JOB, JOB])


@pytest.mark.timeout(20)
def test_a_size_that_a_proxy_refuses_is_not_sent_again() -> None:
    """As nginx does by default above 1 MiB: parts of a file were sent again for two minutes."""
    with answering(413, HTML) as url, Client(url) as client:
        for call in (partial(client.detect, b"x"), partial(client.wait, "job")):
            with pytest.raises(TooLarge, match=r"a proxy at .* got HTTP status 413"):
                call()


def test_an_address_without_a_scheme_is_one_of_http() -> None:
    with answering(429, PROBLEM) as url:
        client = Client(url.removeprefix("http://"))
        with client, pytest.raises(ProblemError, match="Busy: later"):
            client.detect(b"x")


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "::1:8000"])
def test_an_address_that_is_none_is_said_to_be(url: str) -> None:
    with pytest.raises(Unreachable, match=f"expected the address of a service, got {url}"):
        Client(url)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "ftp://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(Unreachable, match=r"proxies in the environment.*proxy"):
        Client("http://127.0.0.1:1")


def test_it_is_said_why_no_service_answers() -> None:
    with answering(200, b"") as url:
        client = Client(url.replace("http:", "https:"))
        with client, pytest.raises(Unreachable, match=r"got no answer: \[SSL"):
            client.models()
    with Client(url) as client, pytest.raises(Unreachable, match=r"got no answer: .*refused"):
        client.models()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)
        with client, pytest.raises(Unreachable, match="got no answer: timed out"):
            client.models()


def test_a_key_is_sent_as_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANDMARKD_API_KEY", key := "schl\xfcssel\n")
    service = ServiceProcess(toy_models(tmp_path), API_KEYS=sha256(key[:-1].encode()).hexdigest())
    try:
        for given in (key, None):
            with Client(service.url, api_key=given) as client:
                assert client.models().models[0].name == MODEL
        with Client(service.url, api_key="") as none, pytest.raises(ProblemError, match="none"):
            none.models()
    finally:
        service.kill()


def test_problem_is_raised_with_its_details() -> None:
    with answering(429, PROBLEM) as url, Client(url) as client:
        with pytest.raises(ProblemError, match="Busy: later") as caught:
            client.detect(b"x")
        assert caught.value.problem.code == "queue-full"


def test_problem_comes_back_from_another_process() -> None:
    """A pool of processes pickles it, and waited forever for one that could not be read again."""
    problem = Problem.model_validate_json(PROBLEM)
    again = pickle.loads(pickle.dumps(ProblemError(problem)))  # noqa: S301 - its own
    assert isinstance(again, ProblemError)
    assert again.problem == problem
    assert str(again) == "Busy: later"


FORKS = """
import os, sys
from app.cli.client import Client
scans = [open(path, "rb").read() for path in sys.argv[2:]]
def ask(number):
    answers = [client.detect(scans[number]) for _ in range(20)]
    return all(answer.volume.shape[0] == 11 + number for answer in answers)
with Client(sys.argv[1]) as client:
    assert ask(0)
    forks = {}
    for number in range(len(scans)):
        forks[number] = os.fork()
        if forks[number] == 0:
            os._exit(0 if ask(number) else 1)
    print([os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks.values()], ask(0))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_processes_get_the_answers_to_their_own_scans(tmp_path: Path) -> None:
    """As in a pool of processes on Linux: all of them sent over the connection of the first."""
    paths = [tmp_path / f"{number}.nii" for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(toy_scan((11 + number, 18, 24)))
    service = ServiceProcess(toy_models(tmp_path))
    try:
        command = [sys.executable, "-c", FORKS, service.url, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    finally:
        service.kill()
    assert (done.stdout, done.stderr) == ("[0, 0, 0, 0] True\n", "")


def test_folder_without_dicom_files_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "one.nii").write_bytes(toy_scan())
    with Client("http://127.0.0.1:1") as client:
        for call in (client.detect, client.submit):
            with pytest.raises(NotAVolume, match=f"DICOM files, got none in {tmp_path}"):
                call(tmp_path)


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
            found = client.detect(scan.read_bytes()).landmarks
            assert client.detect(scan).landmarks == client.detect(str(scan)).landmarks == found
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


@contextmanager
def cut_line(port: int, sent: int) -> Iterator[str]:
    """Pass connections on to a service; the first is cut when so many bytes were sent over it."""
    listener = socket.create_server(("127.0.0.1", 0))
    limits: list[float] = [sent]

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                limit = limits.pop() if limits else math.inf
                for ends in ((far, near, math.inf), (near, far, limit)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    assert limits == []


def pump(source: socket.socket, target: socket.socket, limit: float) -> None:
    with suppress(OSError):
        while limit > 0 and (some := source.recv(int(min(limit, 1 << 16)))):
            target.sendall(some)
            limit -= len(some)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PART_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_parts")
def test_large_scan_arrives_whole_over_a_line_that_is_cut(tmp_path: Path) -> None:
    scan = tmp_path / "scan.nii"
    told, waited = list[float](), list[float]()
    scan.write_bytes(toy_scan((90, 80, 100)))
    service = ServiceProcess(toy_models(tmp_path), JOBS=str(tmp_path / "jobs"))
    try:
        with cut_line(service.port, 3 << 19) as url, Client(url) as client:
            job = client.submit(scan, on_progress=told.append)
            assert client.wait(job.id, waited.append).done == 1
            digest = client.result(job.id).volume.digest
        line = service.wait_for(route="/v1/uploads/{upload}", code="client-left")
    finally:
        service.kill()
    assert digest == blake3(scan.read_bytes()).hexdigest()
    assert 0 < line["bytes"] < 1 << 20
    # What had arrived of the second part was not sent again, so the third one began earlier.
    size = scan.stat().st_size
    assert told[0] == (1 << 20) / size
    assert told[1] == ((2 << 20) + line["bytes"]) / size
    assert told[-1] == 1.0
    assert waited[-1] == 1.0


@pytest.mark.usefixtures("small_parts")
def test_large_scan_arrives_whole_though_the_service_is_killed(tmp_path: Path) -> None:
    scan = toy_scan((90, 80, 100))
    start = partial(ServiceProcess, toy_models(tmp_path), JOBS=str(tmp_path / "jobs"))
    services = [start()]

    def kill_once(_share: float) -> None:
        if len(services) == 1:
            services[0].kill()
            services.append(start(PORT=str(services[0].port)))

    try:
        with Client(services[0].url) as client:
            job = client.submit(scan, on_progress=kill_once)
            assert client.wait(job.id).done == 1
            assert client.result(job.id).volume.digest == blake3(scan).hexdigest()
    finally:
        for service in services:
            service.kill()
    assert len(services) == 2


@pytest.mark.usefixtures("small_parts")
def test_file_that_is_no_longer_sent_leaves_nothing_with_the_service(tmp_path: Path) -> None:
    service = ServiceProcess(toy_models(tmp_path), JOBS=str(tmp_path / "jobs"))

    def interrupt(_share: float) -> None:
        raise KeyboardInterrupt

    try:
        with Client(service.url) as client:
            for _ in range(MAX_OPEN_OF_ONE + 1):
                with pytest.raises(KeyboardInterrupt):
                    client.submit(toy_scan((90, 80, 100)), on_progress=interrupt)
            assert client.jobs().jobs == []
    finally:
        service.kill()
    assert list((tmp_path / "jobs" / "scans").iterdir()) == []


@pytest.mark.timeout(20)
def test_file_that_becomes_shorter_while_it_is_sent_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = tmp_path / "scan.nii"
    scan.write_bytes(b"12345")

    def shorten(*_: object, **_options: object) -> httpx.Response:
        scan.write_bytes(b"123")
        return httpx.Response(200, headers={"Location": "/v1/uploads/1", "Upload-Offset": "3"})

    with Client("http://127.0.0.1:1") as client:
        monkeypatch.setattr(client, "_send", shorten)
        with pytest.raises(BrokenVolume, match="expected a file of 5 bytes, as it was, got 3"):
            client.submit(scan)


def test_jobs_are_waited_for_listed_and_removed(tmp_path: Path) -> None:
    series = tmp_path / "series"
    series.mkdir()
    for number, file in enumerate(as_dicom()):
        (series / f"{number}.dcm").write_bytes(file)
    service = ServiceProcess(toy_models(tmp_path), JOBS=str(tmp_path / "jobs"))
    try:
        with Client(service.url) as client:
            many = client.wait(client.submit(zipped([toy_scan(), b"no scan"])).id)
            assert (many.done, many.failed) == (1, 1)
            assert client.result(many.id).landmarks == client.detect(toy_scan()).landmarks
            with pytest.raises(ProblemError, match="Not a volume"):
                client.result(many.id, 1)
            one = client.wait(client.submit(series, model=MODEL).id)
            assert client.result(one.id).volume == client.detect(series).volume
            assert [job.id for job in client.jobs().jobs] == [one.id, many.id]
            client.remove(many.id)
            with pytest.raises(ProblemError, match="expected a job of yours"):
                client.wait(many.id)
            with pytest.raises(ProblemError, match="expected a NIfTI"):
                client.submit(b"no scan at all, but some bytes " * 99)
            assert [job.id for job in client.jobs().jobs] == [one.id]
    finally:
        service.kill()
