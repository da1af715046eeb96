"""``/v1/uploads``, with the real engine and a real folder."""

import shutil
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import ByteSize
from starlette.types import Message

from app.api.dependencies import hash_key
from app.api.scans import uploads as uploads_module
from app.api.scans.uploads import BLOCK_BYTES
from app.engine.fair_budget import FairBudget
from app.io import HEAD_BYTES, Content, UploadsAnswer, count_scans
from app.jobs import OpenUpload
from app.jobs.uploads import UPLOAD_BYTES
from tests.support.dicom_files import zipped
from tests.support.services import (
    MODEL,
    RAW,
    Response,
    problem_of,
    run_asgi,
    running,
    shared_of,
    toy_scan,
    toy_settings,
)
from tests.unit.api.scans.test_jobs import finished

URL = "/v1/uploads"
TUS = {"Tus-Resumable": "1.0.0"}
PART = TUS | {"Content-Type": "application/offset+octet-stream"}
POSTED = PART | {"Upload-Offset": "0", "X-HTTP-Method-Override": "PATCH", "Host": "localhost"}
SCAN = toy_scan((24, 26, 28))
KEYS = {name: {"Authorization": f"Bearer {name}"} for name in ("anna", "bert")}


def start(client: TestClient, length: int, query: str = "", **headers: str) -> Response:
    return client.post(f"{URL}?{query}", headers=TUS | {"Upload-Length": str(length)} | headers)


def started(client: TestClient, length: int, query: str = "") -> str:
    """Begin an upload; gives its path."""
    response = start(client, length, query)
    assert (response.status_code, response.headers["tus-resumable"]) == (201, "1.0.0")
    assert response.headers["location"].startswith(f"{URL}/")
    return str(response.headers["location"])


def patch(client: TestClient, path: str, offset: int, part: bytes, **headers: str) -> Response:
    return client.patch(path, content=part, headers=PART | {"Upload-Offset": str(offset)} | headers)


def files(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "kept" / "scans").iterdir()]


def test_file_in_parts_becomes_the_job_that_it_had_been_as_a_whole(client: TestClient) -> None:
    query = f"model={MODEL}&format=csv&candidates=true"
    path = started(client, len(SCAN), query)
    for begin, end in ((0, 10), (10, HEAD_BYTES + 10), (HEAD_BYTES + 10, len(SCAN))):
        state = client.head(path, headers=TUS)
        assert (state.status_code, state.content) == (200, b"")
        assert state.headers["upload-offset"] == str(begin)
        assert state.headers["upload-length"] == str(len(SCAN))
        assert state.headers["cache-control"] == "no-store"
        assert state.headers["upload-expires"].endswith(" GMT")
        response = patch(client, path, begin, SCAN[begin:end])
        assert (response.status_code, response.headers["upload-offset"]) == (204, str(end))
    job = response.headers["location"]
    assert job == path.replace("uploads", "jobs")
    assert finished(client, job).done == 1
    assert client.head(path, headers=TUS).headers["upload-offset"] == str(len(SCAN))
    waited = client.post(f"/v1/landmarks?{query}", content=SCAN, headers=RAW)
    assert client.get(f"{job}/scans/0").content == waited.content


def test_whole_file_becomes_a_job_when_its_client_looks(client: TestClient) -> None:
    """As after a process that ended between its last byte and the answer."""
    path = started(client, len(SCAN))
    jobs = shared_of(client).jobs
    assert jobs is not None
    (upload,) = jobs.uploads.list_open("testclient")
    jobs.uploads.append(upload, SCAN)
    found = client.head(path, headers=TUS)
    assert finished(client, found.headers["location"]).done == 1


def test_file_that_has_arrived_takes_no_place_of_uploads(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = shared_of(client).engine.admission
    places = []

    def count(content: Content, limit: int) -> int | None:
        places.append((admission.receiving.used, admission.working.used))
        return count_scans(content, limit)

    monkeypatch.setattr(uploads_module, "count_scans", count)
    assert patch(client, started(client, len(SCAN)), 0, SCAN).status_code == 204
    assert places == [(0, 1)]


def test_no_more_than_a_block_of_a_part_waits_to_be_written(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = shared_of(client).jobs
    assert jobs is not None
    append, written = jobs.uploads.append, list[int]()

    def note(upload: OpenUpload, block: Content) -> None:
        written.append(len(block))
        append(upload, block)

    monkeypatch.setattr(jobs.uploads, "append", note)
    scan = toy_scan((60, 80, 120))
    step = BLOCK_BYTES * 2 // 3
    path = started(client, len(scan))
    chunks: list[Message] = [
        {"type": "http.request", "body": scan[at : at + step], "more_body": at + step < len(scan)}
        for at in range(0, len(scan), step)
    ]
    (head, _) = run_asgi(client, path, *chunks, headers=POSTED)
    assert head["status"] == 204
    assert written == [2 * step, len(scan) - 2 * step]


def test_upload_goes_on_while_its_model_is_not_loaded(models: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(models, tmp_path / "models"))
    settings = toy_settings(mine, jobs=tmp_path / "kept")
    with running(settings) as client:
        path = started(client, len(SCAN))
        assert patch(client, path, 0, SCAN[:10]).status_code == 204
    manifest = mine / MODEL / "model.toml"
    text = manifest.read_text()
    manifest.write_text("none")
    with running(settings) as client:
        response = patch(client, path, 10, SCAN[10:])
        assert response.status_code == 204, response.text
        job = response.headers["location"]
        assert client.get(job).json()["state"] == "queued"
    manifest.write_text(text)
    with running(settings) as client:
        assert finished(client, job).done == 1


def test_archive_in_parts_is_a_job_of_many_scans(client: TestClient) -> None:
    content = zipped([toy_scan(), b"no scan"])
    path = started(client, len(content))
    half = len(content) // 2
    patch(client, path, 0, content[:half])
    job = finished(client, patch(client, path, half, content[half:]).headers["location"])
    assert (job.total, job.done, job.failed) == (2, 1, 1)


def test_unfinished_uploads_are_listed_for_who_began_them(client: TestClient) -> None:
    """A program that was killed goes on with them, or gives their places back."""
    first, second = started(client, 5000), started(client, len(SCAN), f"model={MODEL}")
    patch(client, second, 0, SCAN[:100])
    uploads = UploadsAnswer.model_validate_json(client.get(URL).content).uploads
    assert [f"{URL}/{one.id}" for one in uploads] == [second, first]
    assert [(one.offset, one.length) for one in uploads] == [(100, len(SCAN)), (0, 5000)]
    assert {one.model for one in uploads} == {MODEL}
    told = parsedate_to_datetime(client.head(second, headers=TUS).headers["upload-expires"])
    assert abs(uploads[0].expires - told) < timedelta(seconds=1)
    patch(client, second, 100, SCAN[100:])
    client.delete(first, headers=TUS)
    assert client.get(URL).json() == {"uploads": []}


def test_service_says_what_it_speaks(client: TestClient) -> None:
    response = client.options(URL)
    assert response.status_code == 204
    assert response.headers["tus-version"] == "1.0.0"
    assert response.headers["tus-extension"] == "creation,termination,expiration"
    most = int(response.headers["tus-max-size"])
    problem = problem_of(start(client, most + 1))
    assert problem.code == "too-large"
    assert "LANDMARKD_MAX_INFLATED_BYTES" in problem.detail


@pytest.mark.parametrize(
    ("query", "length", "code"),
    [
        ("model=nobody", "9", "unknown-model"),
        ("format=dwg", "9", "unknown-format"),
        ("timeout_s=1", "9", "bad-parameter"),
        ("", "", "bad-parameter"),
        ("", "0", "bad-parameter"),
        ("", "9" * 30, "bad-parameter"),
    ],
)
def test_what_could_be_no_job_is_not_begun(
    client: TestClient, tmp_path: Path, query: str, length: str, code: str
) -> None:
    response = client.post(f"{URL}?{query}", headers=TUS | {"Upload-Length": length})
    assert problem_of(response).code == code
    assert files(tmp_path) == []


def test_part_that_is_not_the_next_changes_nothing(client: TestClient) -> None:
    path = started(client, len(SCAN))
    patch(client, path, 0, SCAN[:100])
    for offset, part in ((0, SCAN[:100]), (99, b"x"), (101, b"x"), (100, SCAN)):
        assert problem_of(patch(client, path, offset, part)).code == "wrong-offset"
    other = patch(client, path, 100, b"x", **{"Content-Type": "text/plain"})
    assert problem_of(other).code == "unsupported-media-type"
    assert problem_of(client.patch(path, content=b"x", headers=PART)).code == "bad-parameter"
    assert client.head(path, headers=TUS).headers["upload-offset"] == "100"
    job = patch(client, path, 100, SCAN[100:]).headers["location"]
    assert finished(client, job).done == 1


def test_what_has_arrived_of_a_part_that_becomes_too_long_stays(client: TestClient) -> None:
    path = started(client, len(SCAN))
    chunks: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in (SCAN[:100], SCAN)
    ]
    sent = run_asgi(client, path, *chunks, headers=POSTED)
    assert sent[0]["status"] == 409
    assert client.head(path, headers=TUS).headers["upload-offset"] == "100"
    job = patch(client, path, 100, SCAN[100:]).headers["location"]
    assert finished(client, job).done == 1


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("OPTIONS", URL, {}, 204),
        ("HEAD", f"{URL}/none", TUS, 404),
        ("PATCH", f"{URL}/none", PART, 422),
        ("PATCH", f"{URL}/none", TUS | {"Upload-Offset": "0"}, 415),
        ("POST", f"{URL}?model=nobody", TUS | {"Upload-Length": "9"}, 404),
        ("POST", URL, {"Tus-Resumable": "0.2.2", "Upload-Length": "9"}, 412),
        ("POST", URL, TUS | {"Sec-Fetch-Site": "cross-site"}, 403),
        ("PUT", URL, TUS, 405),
    ],
)
def test_every_response_names_the_version_of_the_protocol(
    client: TestClient, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    response = client.request(method, path, headers=headers)
    assert (response.status_code, response.headers["tus-resumable"]) == (status, "1.0.0")


def test_another_version_of_the_protocol_is_refused(client: TestClient) -> None:
    response = start(client, 9, **{"Tus-Resumable": "0.2.2"})
    assert (response.status_code, response.headers["tus-version"]) == (412, "1.0.0")
    assert problem_of(response).code == "wrong-tus-version"


@pytest.mark.parametrize(
    ("content", "size", "code"),
    [
        (b"no scan" * 20_000, HEAD_BYTES, "not-a-volume"),
        (b"no scan", 7, "not-a-volume"),
        (zipped([SCAN])[:-10], None, "broken-volume"),
    ],
)
def test_file_that_is_refused_is_discarded_as_soon_as_that_is_known(
    client: TestClient, tmp_path: Path, content: bytes, size: int | None, code: str
) -> None:
    path = started(client, len(content))
    assert problem_of(patch(client, path, 0, content[:size])).code == code
    assert problem_of(client.get(path)).code == "unknown-job"
    assert files(tmp_path) == []


def test_upload_can_be_given_up(client: TestClient, tmp_path: Path) -> None:
    path = started(client, len(SCAN))
    patch(client, path, 0, SCAN[:100])
    assert client.delete(path, headers=TUS).status_code == 204
    assert problem_of(client.delete(path)).code == "unknown-job"
    assert problem_of(patch(client, path, 100, SCAN[100:])).code == "unknown-job"
    assert files(tmp_path) == []


def test_client_that_only_posts_names_its_method_in_a_header(client: TestClient) -> None:
    def post(path: str, method: str, content: bytes = b"", **headers: str) -> Response:
        headers |= {"X-HTTP-Method-Override": method}
        return client.post(path, content=content, headers=PART | headers)

    path, other = started(client, len(SCAN)), started(client, len(SCAN))
    assert post(path, "PATCH", SCAN[:100], **{"Upload-Offset": "0"}).status_code == 204
    state = post(path, "HEAD")
    assert (state.headers["upload-offset"], state.content) == ("100", b"")
    response = post(path, "patch", SCAN[100:], **{"Upload-Offset": "100"})
    assert finished(client, response.headers["location"]).done == 1
    assert post(other, "DELETE").status_code == 204
    assert problem_of(client.get(other)).code == "unknown-job"
    assert post(URL, "TELEPORT").status_code == 405
    assert post(response.headers["location"], "DELETE").status_code == 405


def test_upload_belongs_to_its_key(models: Path, tmp_path: Path) -> None:
    keys = tuple(hash_key(name) for name in KEYS)
    with running(toy_settings(models, jobs=tmp_path / "kept", api_keys=keys)) as client:
        assert problem_of(start(client, 9)).code == "unauthorized"
        path = start(client, 9, **KEYS["anna"]).headers["location"]
        assert client.get(path, headers=KEYS["anna"]).status_code == 200
        lists = {name: client.get(URL, headers=key).json()["uploads"] for name, key in KEYS.items()}
        assert [one["id"] for one in lists["anna"]] == [path.removeprefix(f"{URL}/")]
        assert lists["bert"] == []
        for method in ("GET", "DELETE"):
            problem = problem_of(client.request(method, path, headers=KEYS["bert"]))
            assert problem.code == "unknown-job"
        assert problem_of(patch(client, path, 0, b"x", **KEYS["bert"])).code == "unknown-job"


def test_uploads_share_the_room_of_jobs(models: Path, tmp_path: Path) -> None:
    room = ByteSize(int((2 * UPLOAD_BYTES + len(SCAN) + 200) / 0.75))
    settings = toy_settings(models, jobs=tmp_path / "kept", jobs_max_bytes=room)
    with running(settings) as client:
        first, second = started(client, len(SCAN)), started(client, len(SCAN))
        patch(client, first, 0, SCAN[:-1])
        refused = patch(client, second, 0, SCAN[:300])
        assert problem_of(refused).code == "queue-full"
        assert int(refused.headers["retry-after"]) > 0
        assert client.head(second).headers["upload-offset"] == "0"
        client.delete(first)
        job = patch(client, second, 0, SCAN).headers["location"]
        assert finished(client, job).done == 1


def test_there_are_no_uploads_without_jobs(models: Path) -> None:
    with running(toy_settings(models)) as client:
        assert problem_of(start(client, 9)).code == "not-configured"
        assert problem_of(client.options(URL)).code == "not-configured"


def test_block_of_a_part_is_charged_as_a_body(client: TestClient) -> None:
    path = started(client, len(SCAN))
    admission = shared_of(client).engine.admission
    admission.body_bytes = FairBudget(BLOCK_BYTES - 1)
    assert "bytes of bodies" in problem_of(patch(client, path, 0, SCAN)).detail
    admission.body_bytes = FairBudget(BLOCK_BYTES)
    assert patch(client, path, 0, SCAN).status_code == 204
    assert admission.body_bytes.used == 0
