"""A service that has started, where the system lets no other thread start."""

import hashlib
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.services import (
    MODEL,
    RAW,
    ServiceProcess,
    ended,
    problem_of,
    toy_models,
    toy_scan,
)

NO_MORE_THREADS = """
import signal
import threading


def start_no_thread(thread):
    raise RuntimeError("can't start new thread")  # As Python says it.


def forbid(*_):
    threading.Thread.start = start_no_thread


signal.signal(signal.SIGUSR1, forbid)
"""
"""The limit of a user's threads binds none of root's, and tests run as root, too."""

CALLS = ("/", "/docs", "/page/page.js", "/openapi.json", "/metrics", "/readyz", "/v1/uploads")


@pytest.mark.parametrize("with_jobs", [True, False], ids=["jobs", "no jobs"])
def test_service_answers_and_stops_where_no_thread_can_start(
    with_jobs: bool, tmp_path: Path
) -> None:
    settings = {"ADMIN_KEY_HASH": hashlib.sha256(b"admin").hexdigest(), "THREADS": "4"}
    settings |= {"JOBS": str(tmp_path / "jobs")} if with_jobs else {}
    with ended(ServiceProcess(toy_models(tmp_path), NO_MORE_THREADS, **settings)) as service:
        os.kill(service.pid, signal.SIGUSR1)
        with httpx.Client(base_url=service.url, timeout=60) as client:
            for path in CALLS if with_jobs else CALLS[:-1]:
                assert client.get(path).status_code == 200, path
            admin = {"Authorization": "Bearer admin"}
            reload = client.post(f"/v1/models/{MODEL}/reload", headers=admin)
            assert (reload.status_code, problem_of(reload).code) == (503, "not-ready")
            assert "allow more processes and threads" in problem_of(reload).detail
            large = toy_scan((64, 56, 72))  # In which loops are split among threads.
            scan = client.post("/v1/landmarks", content=large, headers=RAW)
            assert scan.status_code == 200
        service.terminate()
        assert service.wait() == 0
