"""Jobs of real services that are killed: what was accepted is finished, once."""

import json
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest

from app.api.dependencies import hash_key
from app.jobs import JobFolder
from tests.support import faulty_network as commands
from tests.support.dicom_files import zipped
from tests.support.faulty_network import command_scan, faulty_models
from tests.support.faulty_service import Faulty
from tests.support.model_folders import TILE, make_model_folder
from tests.support.services import RAW, SERVE, ended, until

URL = "/v1/jobs"
ROUNDS = 3
KILLS = 2
"""In a row: a scan that was running in three is given up, whoever was at fault."""

CLIENTS = 3
SCANS = 3
"""In each archive of the ledger."""

SEED = 18
LONGEST_LIFE_S = 1.5
"""From the first upload until the service is killed."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty_models(tmp_path_factory.mktemp("jobs"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for jobs whose database notes every outcome that is written."""
    folder = tmp_path / "kept"
    JobFolder(folder, 1, 1.0).close()
    with closing(sqlite3.connect(folder / "jobs.sqlite")) as database:
        database.executescript(
            "CREATE TABLE written(scan INTEGER);"
            "CREATE TRIGGER note AFTER UPDATE OF outcome ON scan"
            " BEGIN INSERT INTO written VALUES (new.id); END;"
        )
    return folder


def serving(models: Path, folder: Path) -> AbstractContextManager[Faulty]:
    return ended(Faulty(models, JOBS=str(folder)))


def post(service: Faulty, content: bytes, query: str = "") -> str:
    """Have a job accepted; gives its path."""
    response = service.client.post(f"{URL}{query}", content=content, headers=RAW)
    assert response.status_code == 202, response.text
    return response.headers["location"]


def job_of(service: Faulty, path: str) -> dict[str, Any]:
    job: dict[str, Any] = service.client.get(path).json()
    return job


def finished(service: Faulty, path: str) -> dict[str, Any]:
    """Wait until a job has finished."""
    until(lambda: job_of(service, path)["state"] == "finished")
    return job_of(service, path)


def written(folder: Path) -> Counter[int]:
    """Count how often the outcome of each scan was written."""
    with closing(sqlite3.connect(folder / "jobs.sqlite")) as database:
        scans = [row[0] for row in database.execute("SELECT id FROM scan")]
        notes = Counter(row[0] for row in database.execute("SELECT scan FROM written"))
    return Counter({scan: notes[scan] for scan in scans})


def states(folder: Path) -> set[str]:
    """Collect the states of all scans."""
    with closing(sqlite3.connect(folder / "jobs.sqlite")) as database:
        return {row[0] for row in database.execute("SELECT DISTINCT state FROM scan")}


def kept_files(folder: Path) -> list[str]:
    return [path.name for path in (folder / "scans").iterdir()]


def test_job_belongs_to_the_address_and_not_to_one_that_a_header_names(
    models: Path, folder: Path
) -> None:
    forged = {"X-Forwarded-For": "203.0.113.7", "Forwarded": "for=203.0.113.7"}
    with serving(models, folder) as service:
        sent = service.client.post(URL, content=command_scan(), headers=RAW | forged)
        listed = [service.client.get(URL, headers=headers).json() for headers in ({}, forged)]
    assert [[job["id"] for job in each["jobs"]] for each in listed] == [[sent.json()["id"]]] * 2


def test_upload_that_was_cut_by_a_kill_is_no_job(models: Path, folder: Path) -> None:
    scan = command_scan()
    with serving(models, folder) as service:
        connection = socket.create_connection(("127.0.0.1", service.port))
        head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(scan)}\r\n\r\n"
        connection.sendall(head.encode() + scan[: len(scan) // 2])
        until(lambda: service.metric("requests_in_flight") == 1)
        service.kill()
        connection.close()
    with serving(models, folder) as service:
        assert service.client.get(URL).json() == {"jobs": [], "next": None}
        assert kept_files(folder) == []


def test_job_that_was_queued_is_finished_after_a_kill(models: Path, folder: Path) -> None:
    scan = command_scan()
    with serving(models, folder) as service:
        expected = service.ask(scan).json()["landmarks"]
        with service.held():
            # Two run at a time, and none of them gets the device.
            paths = [post(service, content) for content in (scan, zipped([scan, scan]))]
            assert job_of(service, paths[1])["state"] != "finished"
            service.kill()
    with serving(models, folder) as service:
        for path in paths:
            job = finished(service, path)
            assert job["done"] == job["total"]
            for one in job["scans"]:
                assert service.client.get(one["result"]).json()["landmarks"] == expected
    assert set(written(folder).values()) == {1}
    assert kept_files(folder) == []


def test_job_that_was_running_is_run_again_after_a_kill(models: Path, folder: Path) -> None:
    with serving(models, folder) as service:
        path = post(service, command_scan(commands.HOLD, shape=TILE))
        with service.gate.open("wb"):  # The pipe opens once the network does.
            assert job_of(service, path)["state"] == "running"
            service.kill()
    with serving(models, folder) as service:
        with service.gate.open("wb"):
            assert job_of(service, path)["state"] == "running"
        assert finished(service, path)["done"] == 1
    assert set(written(folder).values()) == {1}


@pytest.mark.parametrize("reloads", [False, True], ids=["restarted", "reloaded"])
def test_job_whose_model_is_refused_waits_until_it_is_loaded_again(
    models: Path, folder: Path, tmp_path: Path, *, reloads: bool
) -> None:
    several = Path(shutil.copytree(models, tmp_path / "several"))
    weights = make_model_folder(several, "other") / "weights.safetensors"
    key = hash_key("admin")
    start = partial(Faulty, several, JOBS=str(folder), DEFAULT_MODEL="faulty", ADMIN_KEY_HASH=key)
    with ended(start()) as service, service.held():
        path = post(service, zipped([command_scan()] * 3), "?model=other")
        unwanted = post(service, command_scan(seed=2), "?model=other@1.0.0")
        assert job_of(service, path)["reason"] is None
        service.kill()
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1])
    with ended(start()) as service:
        bytes_kept = service.metric("job_bytes")
        assert finished(service, post(service, command_scan()))["done"] == 1
        job = job_of(service, path)
        assert (job["state"], job["expires"], job["done"], job["failed"]) == ("queued", None, 0, 0)
        assert job["reason"].startswith("expected one of faulty; got 'other', which was refused")
        assert "weights.safetensors" in job["reason"]
        listed = service.client.get(URL).json()["jobs"]
        assert [one["reason"] is None for one in listed] == [True, False, False]
        assert service.metric("job_scans_queued") == 4
        assert service.client.delete(unwanted).status_code == 204
        assert service.metric("job_scans_queued") == 3
        assert service.metric("job_bytes") < bytes_kept + (1 << 20)
        weights.write_bytes(intact)
        if reloads:
            admin = {"Authorization": "Bearer admin"}
            service.client.post("/v1/models/other/reload", headers=admin).raise_for_status()
            assert finished(service, path)["done"] == 3
    with ended(start()) as service:
        job = finished(service, path)
        assert (job["done"], job["reason"]) == (3, None)
        answer = service.client.get(job["scans"][2]["result"])
        assert answer.json()["model"]["name"] == "other"
    assert set(written(folder).values()) == {1}
    assert kept_files(folder) == []


def test_stop_does_not_wait_for_a_job_and_the_next_start_finishes_it(
    models: Path, folder: Path
) -> None:
    with serving(models, folder) as service:
        path = post(service, zipped([command_scan(seed=seed) for seed in range(40)]))
        until(lambda: job_of(service, path)["done"] > 0)
        service.terminate()
        assert service.wait() == 0
    with closing(sqlite3.connect(folder / "jobs.sqlite")) as database:
        states = Counter(database.execute("SELECT state, attempts FROM scan"))
    assert ("queued", 0) in states
    assert {state for state, _ in states} == {"queued", "done"}
    with serving(models, folder) as service:
        assert finished(service, path)["done"] == 40
    assert set(written(folder).values()) == {1}


def test_scan_that_kills_the_service_is_given_up_and_harms_no_other(
    models: Path, folder: Path
) -> None:
    deadly = zipped([command_scan(), command_scan(commands.KILL), command_scan(seed=2)])
    with serving(models, folder) as service:
        path = post(service, deadly)
        ends = [service.wait()]
    for _ in range(2):
        with serving(models, folder) as service:
            ends.append(service.wait())
    assert ends == [-9, -9, -9]
    with serving(models, folder) as service:
        job = finished(service, path)
        assert (job["done"], job["failed"]) == (2, 1)
        assert [scan["state"] for scan in job["scans"]] == ["done", "failed", "done"]
        problem = service.client.get(f"{path}/scans/1")
        assert (problem.status_code, problem.json()["code"]) == (500, "given-up")
        assert "3 times" in problem.json()["detail"]
        failed = service.wait_for(message="scan of a job", code="given-up", job=path.split("/")[-1])
        assert failed["level"] == "warning"
    assert set(written(folder).values()) == {1}


def test_scan_that_ends_the_devices_thread_is_given_up(models: Path, folder: Path) -> None:
    with serving(models, folder) as service:
        path = post(service, command_scan(commands.DIE))
        (scan,) = finished(service, path)["scans"]
        assert scan["problem"]["code"] == "given-up"
        assert finished(service, post(service, command_scan()))["done"] == 1


def test_removed_job_ends_at_once(models: Path, folder: Path) -> None:
    with serving(models, folder) as service, service.held():
        path = post(service, command_scan())
        until(lambda: job_of(service, path)["scans"][0]["tiles"] > 0)
        service.queued(8)
        assert service.client.delete(path).status_code == 204
        until(lambda: service.metric("queue_tiles") == service.metric("scans_preparing") == 0)
        assert service.client.get(URL).json() == {"jobs": [], "next": None}
        assert kept_files(folder) == []


def test_interactive_scan_overtakes_jobs(models: Path, folder: Path) -> None:
    with serving(models, folder) as service:
        path = post(service, zipped([command_scan(seed=seed) for seed in range(60)]))
        until(lambda: job_of(service, path)["done"] > 0)
        assert service.ask(command_scan(seed=99)).status_code == 200
        assert job_of(service, path)["state"] == "running"


def test_second_service_on_the_folder_does_not_start(models: Path, folder: Path) -> None:
    with serving(models, folder):
        second = subprocess.run(
            [sys.executable, "-c", SERVE],
            env={
                "LANDMARKD_MODELS_DIR": str(models), "LANDMARKD_JOBS": str(folder),
                "LANDMARKD_DEVICE": "cpu", "LANDMARKD_PORT": "0",
            },
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert second.returncode != 0
    lines = [json.loads(line) for line in second.stderr.splitlines()]
    (reason,) = [line["reason"] for line in lines if line["message"] == "cannot start"]
    assert reason == f"expected a folder of jobs for this process alone, but another uses {folder}"
    assert "Traceback" not in second.stderr


def test_everything_accepted_is_answered_once_however_often_the_service_is_killed(
    models: Path, folder: Path
) -> None:
    """Killed at any moment, under load: in uploads, while jobs are queued, run and settled."""
    random = np.random.default_rng(SEED)
    scans = [command_scan(seed=seed) for seed in range(SCANS)]
    accepted: list[str] = []
    met: set[str] = set()
    for _ in range(ROUNDS):
        for _ in range(KILLS):
            with serving(models, folder) as service, ThreadPoolExecutor(CLIENTS) as clients:
                ended = Event()
                for _ in range(CLIENTS):
                    clients.submit(_send_until, ended, service.url, scans, accepted)
                ended.wait(float(random.uniform(0.05, LONGEST_LIFE_S)))
                service.kill()
                ended.set()
            met |= states(folder)
        with serving(models, folder) as service:
            expected = [service.ask(scan).json()["landmarks"] for scan in scans]
            listed = [f"{URL}/{one['id']}" for one in service.client.get(URL).json()["jobs"]]
            assert set(accepted) <= set(listed)
            # Those whose acceptance nobody heard of are jobs as well.
            for path in listed:
                job = finished(service, path)
                assert (job["total"], job["done"]) == (SCANS, SCANS)
                found = [service.client.get(one["result"]).json() for one in job["scans"]]
                assert [one["landmarks"] for one in found] == expected
        assert set(written(folder).values()) == {1}
        assert kept_files(folder) == []
    assert len(accepted) == len(set(accepted)) >= ROUNDS
    assert met == {"queued", "running", "done"}


def _send_until(ended: Event, url: str, scans: list[bytes], accepted: list[str]) -> None:
    """Send jobs until the service is killed; note those that were accepted."""
    while not ended.is_set():
        try:
            response = httpx.post(url + URL, content=zipped(scans), headers=RAW, timeout=60)
        except httpx.TransportError:
            return
        if response.status_code == 202:
            accepted.append(response.headers["location"])
