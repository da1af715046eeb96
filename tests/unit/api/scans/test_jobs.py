"""``/v1/jobs``, with the real engine and a real folder."""

import asyncio
import json
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.api.dependencies import hash_key
from app.api.problems import describe_problem
from app.errors import NotAVolume, NotStored
from app.io import Selection
from app.io.schemas import JobAnswer, JobsAnswer, JobScanAnswer, LandmarksAnswer
from app.jobs.folder import JOB_BYTES, SCAN_BYTES
from app.jobs.records import Claim, KeptJob, Order
from app.jobs.runner import CALLING, LOGGED_ATTEMPTS, WRITING
from app.jobs.store import JobStore
from tests.support.dicom_files import as_dicom, zipped
from tests.support.services import (
    MODEL,
    PATIENCE_S,
    RAW,
    Response,
    problem_of,
    running,
    shared_of,
    toy_scan,
    toy_settings,
    until,
)

URL = "/v1/jobs"
KEYS = {name: {"Authorization": f"Bearer {name}"} for name in ("anna", "bert")}
ORDER = Order("testclient", "mine", MODEL, "json", candidates=False, selection=Selection())
PROBLEM = describe_problem(NotAVolume("expected a scan, got another file"), "mine")
ASYNC = {"Prefer": "handling=lenient, Respond-Async; wait=10"}


def accepted(response: Response) -> str:
    """Check that a job was accepted; gives its path."""
    assert response.status_code == 202, response.text
    job = JobAnswer.model_validate_json(response.content)
    assert response.headers["location"] == f"{URL}/{job.id}"
    return f"{URL}/{job.id}"


def claimed(store: JobStore) -> Claim:
    """Claim the next scan; the service does not, as it was not told of its job."""
    claim = store.claim([MODEL])
    assert claim is not None
    return claim


def finished(client: TestClient, path: str, **headers: str) -> JobAnswer:
    """Wait until a job has finished."""

    def ask() -> JobAnswer:
        return JobAnswer.model_validate_json(client.get(path, headers=headers).content)

    until(lambda: ask().state == "finished")
    return ask()


def test_result_is_the_answer_that_a_client_had_waited_for(client: TestClient) -> None:
    headers = RAW | {"X-Request-ID": "mine"}
    query = f"model={MODEL}&format=csv&candidates=true"
    path = accepted(client.post(f"{URL}?{query}", content=toy_scan(), headers=headers))
    job = finished(client, path)
    assert (job.total, job.done, job.failed, job.model) == (1, 1, 0, MODEL)
    assert job.expires is not None
    assert job.scans[0].result == f"{path}/scans/0"
    waited = client.post(f"/v1/landmarks?{query}", content=toy_scan(), headers=RAW)
    result = client.get(f"{path}/scans/0")
    assert (result.content, result.headers["content-type"]) == (
        waited.content,
        waited.headers["content-type"],
    )
    answer = LandmarksAnswer.model_validate_json(client.get(f"{path}/scans/0?format=json").content)
    assert answer.request_id == "mine"
    assert answer.landmarks[0].candidates is not None


@pytest.mark.parametrize("prefix", ["/lab", "lab/", "//lab", "/v1"])
def test_links_have_the_path_that_a_proxy_took_off(client: TestClient, prefix: str) -> None:
    behind = {"X-Forwarded-Prefix": prefix}
    response = client.post(URL, content=toy_scan(), headers=RAW | behind)
    path = f"{URL}/{response.json()['id']}"
    assert response.headers["location"] == f"/{prefix.strip('/')}{path}"
    job = finished(client, path, **behind)
    assert job.scans[0].result == f"/{prefix.strip('/')}{path}/scans/0"


def test_scans_of_an_archive_end_each_for_itself(client: TestClient) -> None:
    content = zipped([toy_scan(), b"no scan", zipped(as_dicom()), toy_scan((12, 14, 16))])
    path = accepted(client.post(URL, content=content, headers=RAW))
    job = finished(client, path)
    assert (job.total, job.done, job.failed) == (4, 3, 1)
    assert [scan.state for scan in job.scans] == ["done", "failed", "done", "done"]
    problem = job.scans[1].problem
    assert problem is not None
    assert (problem.code, problem.status) == ("not-a-volume", 400)
    response = client.get(f"{path}/scans/1")
    assert (response.status_code, response.json()) == (400, problem.model_dump())
    assert response.headers["content-type"] == "application/problem+json"
    shapes = [client.get(f"{path}/scans/{at}").json()["volume"]["shape"] for at in (0, 3)]
    assert shapes == [[20, 18, 24], [12, 14, 16]]


def test_job_is_told_as_its_model_says(client: TestClient) -> None:
    runner = shared_of(client).jobs
    assert runner is not None
    job = runner.store.accept(ORDER, zipped([b"x"] * 4), 4)
    assert runner.store.settle(claimed(runner.store), "done", "{}")
    assert runner.store.settle(claimed(runner.store), "failed", PROBLEM.model_dump_json())
    content = client.get(f"{URL}/{job}").content
    answer = JobAnswer.model_validate_json(content)
    assert answer.model_dump_json().encode() == content
    done, failed, *waiting = answer.scans
    assert (done.number, done.state, done.result) == (0, "done", f"{URL}/{job}/scans/0")
    assert (failed.state, failed.result, failed.problem) == ("failed", None, PROBLEM)
    assert [scan.state for scan in waiting] == ["queued"] * 2
    scan = claimed(runner.store).id
    found = runner.store.find(ORDER.owner, job, progress={scan: (3, 8)})
    running = JobScanAnswer.model_validate(json.loads(found.scans)[2])
    assert (running.state, running.tile, running.tiles) == ("running", 3, 8)


def test_many_failed_scans_of_a_job_are_told_without_work_on_the_event_loop(
    client: TestClient, tmp_path: Path
) -> None:
    runner, portal = shared_of(client).jobs, client.portal
    assert runner is not None
    assert portal is not None

    def spent_s(scans: int) -> float:
        job = runner.store.accept(ORDER, zipped([b"x"] * scans), scans)
        with closing(sqlite3.connect(tmp_path / "kept" / "jobs.sqlite")) as db, db:
            outcome = PROBLEM.model_dump_json()
            db.execute("UPDATE scan SET state = 'failed', outcome = ?", (outcome,))
        times = list[float]()
        for _ in range(5):
            begin_s = portal.call(time.thread_time)
            assert len(client.get(f"{URL}/{job}").json()["scans"]) == scans
            times.append(portal.call(time.thread_time) - begin_s)
        return min(times)

    assert spent_s(1000) < 3 * spent_s(1)


def test_form_is_taken_as_for_landmarks(client: TestClient) -> None:
    path = accepted(client.post(URL, files={"volume": ("a.nii", toy_scan())}))
    assert finished(client, path).done == 1


@pytest.mark.parametrize("kind", ["scan", "series"])
def test_client_of_landmarks_may_prefer_a_job(client: TestClient, kind: str) -> None:
    content = toy_scan() if kind == "scan" else zipped(as_dicom())
    response = client.post("/v1/landmarks?timeout_s=1e9", content=content, headers=RAW | ASYNC)
    path = accepted(response)
    assert response.headers["preference-applied"] == "respond-async"
    assert finished(client, path).done == 1


def test_archive_for_landmarks_is_one_scan_whether_a_job_or_not(client: TestClient) -> None:
    content = zipped([toy_scan(), toy_scan()])
    path = accepted(client.post("/v1/landmarks", content=content, headers=RAW | ASYNC))
    (scan,) = finished(client, path).scans
    waited = problem_of(client.post("/v1/landmarks", content=content, headers=RAW))
    assert scan.problem is not None
    assert scan.problem.code == waited.code


def test_preference_is_ignored_where_no_jobs_are_kept(models: Path) -> None:
    with running(toy_settings(models)) as client:
        response = client.post("/v1/landmarks", content=toy_scan(), headers=RAW | ASYNC)
        assert response.status_code == 200
        assert "preference-applied" not in response.headers
        for method, path in (("POST", URL), ("GET", URL), ("DELETE", f"{URL}/x")):
            problem = problem_of(client.request(method, path, content=b"", headers=RAW))
            assert (problem.status, problem.code) == (501, "not-configured")
            assert "LANDMARKD_JOBS" in problem.detail


@pytest.mark.parametrize(
    ("query", "content", "status", "code"),
    [
        ("model=nobody", toy_scan(), 404, "unknown-model"),
        ("format=dwg", toy_scan(), 406, "unknown-format"),
        ("timeout_s=1", toy_scan(), 422, "bad-parameter"),
        (f"frame={1 << 63}", zipped([toy_scan()]), 422, "bad-parameter"),
        (f"series={1 << 63}", zipped(as_dicom()), 422, "bad-parameter"),
        ("", b"no scan", 400, "not-a-volume"),
        ("", zipped([toy_scan()])[:-10], 400, "broken-volume"),
        ("", zipped([]), 400, "not-a-volume"),
    ],
)
def test_what_can_be_refused_at_once_is_no_job(
    client: TestClient, query: str, content: bytes, status: int, code: str
) -> None:
    problem = problem_of(client.post(f"{URL}?{query}", content=content, headers=RAW))
    assert (problem.status, problem.code) == (status, code)
    assert client.get(URL).json() == {"jobs": [], "next": None}


def test_jobs_are_listed_in_parts_between_which_some_may_be_removed(client: TestClient) -> None:
    jobs = [accepted(client.post(URL, content=toy_scan(), headers=RAW)) for _ in range(5)]
    listed, query = list[str](), "limit=2"
    while query:
        part = JobsAnswer.model_validate_json(client.get(f"{URL}?{query}").content)
        listed += (f"{URL}/{job.id}" for job in part.jobs)
        client.delete(listed[-1])
        query = f"limit=2&after={part.next}" if part.next else ""
    assert listed == jobs[::-1]
    for query in ("state=finished", "limit=1001", f"after={part.jobs[-1].id}"):
        assert problem_of(client.get(f"{URL}?{query}")).code == "bad-parameter"


def test_scan_of_a_number_that_no_job_reaches_is_unknown(client: TestClient) -> None:
    for number, status in ((1, 404), ((1 << 31) - 1, 404), (1 << 63, 422), (-1, 422)):
        problem = problem_of(client.get(f"{URL}/x/scans/{number}"))
        assert problem.status == status


def test_job_is_run_by_the_version_that_it_asks_for(models: Path, tmp_path: Path) -> None:
    versions = tmp_path / "models"
    for folder, version in ((MODEL, "1.0.0"), (f"{MODEL}@1.10.0", "1.10.0")):
        shutil.copytree(models / MODEL, versions / folder)
        manifest = versions / folder / "model.toml"
        manifest.write_text(manifest.read_text().replace("1.0.0", version))
    pinned, newest = f"{MODEL}@1.0.0", MODEL
    settings = toy_settings(versions, jobs=tmp_path / "kept", default_model=pinned)
    with running(settings) as client:
        for query, version in (
            (f"?model={pinned}", "1.0.0"),
            ("", "1.0.0"),
            (f"?model={newest}", "1.10.0"),
        ):
            path = accepted(client.post(f"{URL}{query}", content=toy_scan(), headers=RAW))
            assert finished(client, path).done == 1
            assert client.get(f"{path}/scans/0").json()["model"]["version"] == version


def test_job_belongs_to_a_key(models: Path, tmp_path: Path) -> None:
    keys = tuple(hash_key(name) for name in KEYS)
    with running(toy_settings(models, jobs=tmp_path / "kept", api_keys=keys)) as client:
        headers = RAW | KEYS["anna"]
        path = accepted(client.post(URL, content=toy_scan(), headers=headers))
        assert finished(client, path, **KEYS["anna"]).done == 1
        listed = JobsAnswer.model_validate_json(client.get(URL, headers=KEYS["anna"]).content)
        assert [f"{URL}/{job.id}" for job in listed.jobs] == [path]
        # The scheme of a header has no case: it is the same key.
        assert client.get(path, headers={"Authorization": "bearer anna"}).status_code == 200
        assert client.get(URL, headers=KEYS["bert"]).json() == {"jobs": [], "next": None}
        for method, below in (("GET", ""), ("GET", "/scans/0"), ("DELETE", "")):
            response = client.request(method, path + below, headers=KEYS["bert"])
            assert problem_of(response).code == "unknown-job"
            assert problem_of(client.request(method, path + below)).code == "unauthorized"
        assert client.delete(path, headers=KEYS["anna"]).status_code == 204
        assert client.get(URL, headers=KEYS["anna"]).json() == {"jobs": [], "next": None}


def test_client_whose_jobs_take_its_room_is_refused_until_it_deletes_one(
    models: Path, tmp_path: Path
) -> None:
    room = 2 * (
        JOB_BYTES + SCAN_BYTES + len(toy_scan())
    )  # Of which one client may take three quarters.
    settings = toy_settings(models, jobs=tmp_path / "kept", jobs_max_bytes=room)
    with running(settings) as client:
        content = zipped([b"x"] * 20)
        assert problem_of(client.post(URL, content=content, headers=RAW)).code == "too-large"
        path = accepted(client.post(URL, content=toy_scan(), headers=RAW))
        finished(client, path)
        refused = client.post(URL, content=toy_scan(), headers=RAW)
        assert problem_of(refused).code == "queue-full"
        assert int(refused.headers["retry-after"]) > 0
        deleted = client.delete(path)
        assert (deleted.status_code, deleted.headers.get("content-type")) == (204, None)
        accepted(client.post(URL, content=toy_scan(), headers=RAW))


def test_large_jobs_of_one_client_hold_up_nothing_of_another(client: TestClient) -> None:
    runner = shared_of(client).jobs
    assert runner is not None
    written, done = [threading.Event() for _ in range(WRITING + 1)], list[str]()

    async def accept_all() -> None:
        slow = [
            asyncio.create_task(runner.accept("greedy", partial(event.wait, PATIENCE_S)))
            for event in written
        ]
        await asyncio.sleep(0)
        other = asyncio.create_task(runner.accept("other", partial(done.append, "other")))
        await runner.call("other", partial(done.append, "call"))
        assert done == ["call"]
        written[0].set()
        await (
            other
        )  # Before the last of those that came before it, which still waits to be written.
        for event in written:
            event.set()
        assert all(await asyncio.gather(*slow))

    assert client.portal is not None
    client.portal.call(accept_all)
    assert done == ["call", "other"]


def test_many_calls_of_one_client_hold_up_none_of_another(client: TestClient) -> None:
    runner, done, free = shared_of(client).jobs, list[str](), threading.Event()
    assert runner is not None

    async def call_all() -> None:
        calls = [
            asyncio.create_task(runner.call("greedy", partial(free.wait, PATIENCE_S))),
            *(
                asyncio.create_task(runner.call("greedy", partial(done.append, "greedy")))
                for _ in range(20)
            ),
            asyncio.create_task(runner.call("other", partial(done.append, "other"))),
        ]
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*calls)

    assert client.portal is not None
    client.portal.call(call_all)
    assert len(done) == 21
    assert done.index("other") <= CALLING


def test_outcome_is_kept_once_the_disk_takes_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.jobs.runner.RETRY_S", 0.01)
    runner = shared_of(client).jobs
    assert runner is not None
    settle, refusals = runner.store.settle, [NotStored("full")] * LOGGED_ATTEMPTS

    def settle_later(*values: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return settle(*values)

    monkeypatch.setattr(runner.store, "settle", settle_later)
    assert finished(client, accepted(client.post(URL, content=toy_scan(), headers=RAW))).done == 1
    assert not refusals
    assert caplog.text.count("the folder of jobs takes nothing") == 1
    assert runner.why_waits(KeptJob("another", MODEL, 0.0, None, {"queued": 1})) is None


def test_jobs_of_the_process_before_are_there(models: Path, tmp_path: Path) -> None:
    settings = toy_settings(models, jobs=tmp_path / "kept")
    with running(settings) as client:
        path = accepted(client.post(URL, content=zipped([toy_scan()] * 4), headers=RAW))
    with running(settings) as client:
        assert finished(client, path).done == 4


def test_job_says_why_it_waits_where_no_model_is_usable(models: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(models, tmp_path / "models"))
    settings = toy_settings(mine, jobs=tmp_path / "kept", admin_key_hash=hash_key("admin"))
    with running(settings) as client:
        jobs = shared_of(client).jobs
        assert jobs is not None
        path = f"{URL}/{jobs.store.accept(ORDER, toy_scan(), None)}"  # It is not told to run it.
    manifest = mine / MODEL / "model.toml"
    text = manifest.read_text()
    manifest.write_text("none")
    with running(settings) as client:
        job = JobAnswer.model_validate_json(client.get(path).content)
        assert (job.state, job.reason, job.expires) == ("queued", "no usable model", None)
        early = problem_of(client.get(f"{path}/scans/0"))
        assert (early.status, early.code) == (409, "not-finished")
        manifest.write_text(text)
        key = {"Authorization": "Bearer admin"}
        assert client.post(f"/v1/models/{MODEL}/reload", headers=key).status_code == 200
        job = finished(client, path)
        assert (job.done, job.reason) == (1, None)


def test_finished_job_is_removed_in_time_without_a_call(models: Path, tmp_path: Path) -> None:
    with running(toy_settings(models, jobs=tmp_path / "kept", jobs_ttl_s=0.5)) as client:
        path = accepted(client.post(URL, content=toy_scan(), headers=RAW))
        until(lambda: client.get(path).status_code == 404)
        assert client.get(URL).json() == {"jobs": [], "next": None}
