"""How jobs and what is asked of them are counted, logged and told, with the real engine."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.api.problems import describe_problem
from app.errors import NetworkFailed
from app.io.schemas import JobAnswer
from app.jobs.folder import JOB_BYTES, SCAN_BYTES
from tests.support.dicom_files import zipped
from tests.support.services import RAW, shared_of, toy_scan
from tests.unit.api.scans.test_jobs import ORDER, URL, accepted, claimed, finished


def test_jobs_are_counted(client: TestClient) -> None:
    finished(client, accepted(client.post(URL, content=zipped([toy_scan(), b"x"]), headers=RAW)))
    text = shared_of(client).metrics.render().decode()
    assert 'landmarkd_job_scans_total{code="ok"} 1.0' in text
    assert 'landmarkd_job_scans_total{code="not-a-volume"} 1.0' in text
    assert "landmarkd_job_scans_queued 0.0" in text
    assert f"landmarkd_job_bytes {(JOB_BYTES + 2 * SCAN_BYTES) / 1e6}e+06" in text


def test_failure_that_is_read_again_is_no_new_one(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is paged because a client asks time and again."""
    caplog.set_level("INFO")
    runner = shared_of(client).jobs
    assert runner is not None
    job = runner.store.accept(ORDER, toy_scan(), None)
    problem = describe_problem(NetworkFailed("expected finite scores, got others"), "mine")
    assert runner.store.settle(claimed(runner.store), "failed", problem.model_dump_json())
    for _ in range(2):
        response = client.get(f"{URL}/{job}/scans/0")
        assert (response.status_code, response.json()) == (500, problem.model_dump())
    text = shared_of(client).metrics.render().decode()
    route = "/v1/jobs/{job}/scans/{number}"
    assert f'landmarkd_requests_total{{code="kept-problem",route="{route}"}} 2.0' in text
    assert f'landmarkd_requests_total{{code="network-failed",route="{route}"}} 0.0' in text
    read = [record.levelname for record in caplog.records if record.name == "app.requests"]
    assert read == ["INFO"] * 2


def test_a_scan_that_is_done_at_once_is_told_with_its_path(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = shared_of(client).jobs
    assert runner is not None
    accept, store = runner.store.accept, runner.store

    def accept_and_settle(*job: Any) -> str:
        accepted_id = accept(*job)
        assert store.settle(claimed(store), "done", "{}")
        return accepted_id

    monkeypatch.setattr(store, "accept", accept_and_settle)
    response = client.post(URL, content=toy_scan(), headers=RAW)
    (scan,) = JobAnswer.model_validate_json(response.content).scans
    assert scan.result == f"{response.headers['location']}/scans/0"
