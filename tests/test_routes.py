"""Routes: every call, and every way in which one can fail, against the real engine."""

import asyncio
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message, Scope

from app.schemas import LandmarksAnswer, ModelInfo, ModelsAnswer, Problem
from tests.services import MODEL, RAW, SHAPE, running, toy_models, toy_scan, toy_settings

LIMIT = 100_000
URL = "/v1/landmarks"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("routes"))


@pytest.fixture(scope="module")
def client(models: Path) -> Iterator[TestClient]:
    with running(toy_settings(models, max_body_bytes=LIMIT, max_in_flight=2)) as client:
        yield client


@pytest.fixture(scope="module")
def scan() -> bytes:
    return toy_scan()


def problem_of(response: Any) -> Problem:  # noqa: ANN401 - httpx or httpx2, as TestClient has it
    assert response.headers["content-type"] == "application/problem+json"
    problem = Problem.model_validate_json(response.content)
    assert problem.status == response.status_code
    assert problem.request_id == response.headers["x-request-id"]
    return problem


def stable(content: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(content)
    return {key: value for key, value in answer.items() if key not in ("request_id", "timing_ms")}


def test_raw_upload_is_answered_with_landmarks(client: TestClient, scan: bytes) -> None:
    response = client.post(URL, content=scan, headers=RAW)
    assert response.status_code == 200, response.text
    answer = LandmarksAnswer.model_validate_json(response.content)
    assert answer.model.name == MODEL
    assert answer.volume.shape == SHAPE
    assert answer.volume.spacing_mm == pytest.approx((1.0, 1.25, 0.8))
    assert answer.request_id == response.headers["x-request-id"]
    assert all(landmark.candidates is None for landmark in answer.landmarks)


def test_answer_names_every_landmark_in_the_manifests_order(
    client: TestClient, scan: bytes
) -> None:
    info = ModelInfo.model_validate_json(client.get(f"/v1/models/{MODEL}").content)
    answer = LandmarksAnswer.model_validate_json(client.post(URL, content=scan).content)
    assert [item.name for item in answer.landmarks] == [item.name for item in info.landmarks]


def test_framing_of_the_upload_does_not_change_the_answer(client: TestClient, scan: bytes) -> None:
    zipped = gzip.compress(scan)

    raw = client.post(URL, content=scan, headers=RAW)
    others = [
        client.post(URL, content=zipped, headers={"Content-Type": "application/gzip"}),
        client.post(URL, content=zipped, headers=RAW | {"Content-Encoding": "gzip"}),
        client.post(URL, content=iter([scan[:7], scan[7:]]), headers=RAW),
        client.post(URL, content=scan),
        client.post(URL, files={"volume": ("patient name.nii", scan)}),
        client.post(URL, files={"volume": ("patient name.nii.gz", zipped, "application/gzip")}),
    ]
    assert raw.status_code == 200
    for other in others:
        assert stable(other.content) == stable(raw.content)


def test_stage_times_are_in_the_answer_and_the_header(client: TestClient, scan: bytes) -> None:
    response = client.post(URL, content=scan, headers=RAW)
    timing = LandmarksAnswer.model_validate_json(response.content).timing_ms.model_dump()
    header = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(header) == list(timing)
    assert {name: float(ms) for name, ms in header.items()} == pytest.approx(timing, abs=1e-3)
    assert timing["total"] >= timing["receive"] + timing["decode"]


def test_candidates_are_listed_when_asked_for(client: TestClient, scan: bytes) -> None:
    content = client.post(URL, content=scan, headers=RAW, params={"candidates": "true"}).content
    answer = LandmarksAnswer.model_validate_json(content)
    assert all(landmark.candidates is not None for landmark in answer.landmarks)


@pytest.mark.parametrize(
    ("params", "accept", "media_type"),
    [
        ({}, None, "application/json"),
        ({}, "*/*", "application/json"),
        ({}, "text/html, application/*;q=0.8", "application/json"),
        ({}, "text/csv", "text/csv; charset=utf-8"),
        ({"format": "mrk.json"}, "text/csv", "application/vnd.slicer.markups+json"),
        ({"format": "fcsv"}, None, "text/vnd.slicer.fcsv; charset=utf-8"),
    ],
)
def test_query_or_accept_chooses_the_format(
    params: dict[str, str], accept: str | None, media_type: str, client: TestClient, scan: bytes
) -> None:
    headers = RAW | ({"Accept": accept} if accept else {})
    response = client.post(URL, content=scan, headers=headers, params=params)
    assert response.status_code == 200
    assert response.headers["content-type"] == media_type


@pytest.mark.parametrize(
    ("changes", "status", "code", "words"),
    [
        ({"content": b""}, 400, "not-a-volume", "got 0 bytes"),
        ({"content": b"not a volume " * 99}, 400, "not-a-volume", "expected"),
        ({"params": {"model": "nope"}}, 404, "unknown-model", f"one of {MODEL}; got 'nope'"),
        ({"params": {"format": "png"}}, 406, "unknown-format", "got 'png'"),
        ({"headers": {"Accept": "image/png"}}, 406, "unknown-format", "got 'image/png'"),
        ({"content": bytes(LIMIT + 1)}, 413, "too-large", f"at most {LIMIT} bytes"),
        (
            {"content": iter([bytes(LIMIT), b"1"]), "headers": RAW},
            413,
            "too-large",
            f"at most {LIMIT} bytes",
        ),
        ({"headers": {"Content-Type": "image/png"}}, 415, "unsupported-media-type", "image/png"),
        ({"headers": RAW | {"Content-Encoding": "br"}}, 415, "unsupported-media-type", "'br'"),
        ({"headers": {"Content-Type": "multipart/form-data"}}, 415, "unsupported-media-type", ""),
        ({"params": {"timeout_s": "-3"}}, 422, "bad-parameter", "timeout_s: "),
        ({"params": {"timeout_s": "nan"}}, 422, "bad-parameter", "timeout_s: "),
        ({"params": {"timeout_s": "1e6"}}, 422, "bad-parameter", "at most 600, got 1e+06"),
        ({"params": {"frame": "-1"}}, 422, "bad-parameter", "frame: "),
        ({"params": {"modle": MODEL}}, 422, "bad-parameter", "modle: "),
        ({"params": {"timeout_s": "1e-6"}}, 504, "deadline-exceeded", "expected"),
    ],
)
def test_refusal_is_a_problem_that_says_expected_and_got(
    changes: dict[str, Any],
    status: int,
    code: str,
    words: str,
    client: TestClient,
    scan: bytes,
) -> None:
    response = client.post(URL, **({"content": scan} | changes))
    problem = problem_of(response)
    assert (problem.status, problem.code) == (status, code)
    assert words in problem.detail


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"--b--\r\n", 422, "expected a form field 'volume', got none"),
        (
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n',
            422,
            "'file'",
        ),
        (b"--b\r\nX-Other: 1\r\n\r\nx\r\n--b--\r\n", 422, "without a name"),
        (
            b'--b\r\nContent-Disposition: form-data; name="volume"\r\n\r\nx\r\n'
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nx\r\n--b--\r\n',
            422,
            "got more",
        ),
        (b'--b\r\nContent-Disposition: form-data; name="volume"\r\n\r\nx', 400, "well-formed"),
        (b"no boundary at all", 400, "well-formed"),
    ],
)
def test_form_without_exactly_one_volume_is_refused(
    body: bytes, status: int, words: str, client: TestClient
) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    problem = problem_of(client.post(URL, content=body, headers=headers))
    assert problem.status == status
    assert words in problem.detail


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", URL, 405),
        ("DELETE", "/livez", 405),
        ("GET", "/v1/models/nope", 404),
        ("POST", "/v1/models/toy/reload", 401),
    ],
)
def test_errors_of_the_framework_are_problems_too(
    method: str, path: str, status: int, client: TestClient
) -> None:
    response = client.request(method, path)
    assert problem_of(response).status == status
    if status == 405:
        assert response.headers["allow"]


def test_unexpected_error_is_answered_without_details(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(toy_settings(models)) as client:
        engine = client.app.state.shared.engine  # type: ignore[attr-defined]
        monkeypatch.setattr(type(engine), "readiness", lambda _: 1 / 0)
        response = client.get("/readyz", headers={"X-Request-ID": "abc"})
        monkeypatch.undo()
    problem = problem_of(response)
    assert (problem.status, problem.code, problem.request_id) == (500, "internal", "abc")
    assert "division" not in response.text
    assert any(getattr(line, "request_id", "") == "abc" for line in caplog.records)


def test_sane_request_id_is_kept_and_another_replaced(client: TestClient) -> None:
    kept = client.get("/livez", headers={"X-Request-ID": "run-7.a_B"})
    assert kept.headers["x-request-id"] == "run-7.a_B"
    for odd in ("", "x" * 65, "a b", "<script>"):
        replaced = client.get("/livez", headers={"X-Request-ID": odd})
        assert replaced.headers["x-request-id"] not in ("", odd)


def test_request_over_the_limit_gets_429_before_its_body_is_read(client: TestClient) -> None:
    engine = client.app.state.shared.engine  # type: ignore[attr-defined]
    with engine.admit(10), engine.admit(10):
        response = client.post(URL, content=b"x", headers=RAW)
    assert problem_of(response).code == "queue-full"
    assert int(response.headers["retry-after"]) >= 1
    assert engine.in_flight == 0


def test_client_that_leaves_takes_its_work_with_it(client: TestClient, scan: bytes) -> None:
    sent: list[Message] = []

    async def talk() -> None:
        coming: list[Message] = [
            {"type": "http.request", "body": scan, "more_body": False},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Message:
            return coming.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        await client.app(scope_of(URL), receive, send)

    assert client.portal is not None
    client.portal.call(talk)
    assert sent[0]["status"] == 499
    engine = client.app.state.shared.engine  # type: ignore[attr-defined]
    assert engine.in_flight == 0
    assert 'landmarkd_requests_total{code="client-left",route="/v1/landmarks"}' in metrics(client)
    assert client.post(URL, content=scan).status_code == 200


def test_body_that_comes_too_slowly_is_answered_408(models: Path) -> None:
    sent: list[Message] = []

    async def talk(client: TestClient) -> None:
        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        await client.app(scope_of(URL), receive, send)

    with running(toy_settings(models, body_timeout_s=0.05)) as client:
        assert client.portal is not None
        client.portal.call(talk, client)
    assert sent[0]["status"] == 408


def scope_of(path: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }


def metrics(client: TestClient) -> str:
    text: str = client.get("/metrics").text
    return text


def test_models_are_listed_and_described(client: TestClient) -> None:
    listed = ModelsAnswer.model_validate_json(client.get("/v1/models").content).models
    assert [(item.name, item.status) for item in listed] == [(MODEL, "ready")]
    info = ModelInfo.model_validate_json(client.get(f"/v1/models/{MODEL}").content)
    assert info.digest == listed[0].digest
    assert len(info.landmarks) == listed[0].landmarks


def test_probes_say_alive_and_ready(client: TestClient) -> None:
    assert client.get("/livez").json() == {"alive": True}
    response = client.get("/readyz")
    assert response.status_code == 200
    assert response.json()["models"] == {MODEL: "ready"}


def test_service_without_a_model_is_alive_but_not_ready(tmp_path: Path) -> None:
    with running(toy_settings(tmp_path)) as client:
        assert client.get("/livez").status_code == 200
        response = client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["reason"]
        assert problem_of(client.post(URL, content=b"x")).code == "not-ready"


def test_broken_model_is_listed_with_its_reason_and_the_other_serves(
    tmp_path: Path, scan: bytes
) -> None:
    models = toy_models(tmp_path)
    (models / "broken").mkdir()
    (models / "broken" / "model.toml").write_text("schema = 2")
    with running(toy_settings(models)) as client:
        listed = {
            item["name"]: item["status"] for item in client.get("/v1/models").json()["models"]
        }
        assert "schema" in listed["broken"]
        problem = problem_of(client.get("/v1/models/broken"))
        assert "schema" in problem.detail
        response = client.post(URL, content=scan, headers=RAW, params={"model": MODEL})
        assert response.status_code == 200


def test_metrics_count_requests_by_route_and_outcome(client: TestClient, scan: bytes) -> None:
    client.post(URL, content=scan)
    client.post(URL, content=b"")
    client.get("/patients/jane")
    text = metrics(client)
    assert 'landmarkd_requests_total{code="ok",route="/v1/landmarks"}' in text
    assert 'landmarkd_requests_total{code="not-a-volume",route="/v1/landmarks"}' in text
    assert 'landmarkd_requests_total{code="not-found",route="unmatched"}' in text
    assert 'landmarkd_stage_seconds_count{stage="network"}' in text
    assert "landmarkd_requests_in_flight 0.0" in text
    assert "jane" not in text


def test_log_line_of_a_request_holds_no_file_name(
    client: TestClient, scan: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app.requests")
    client.post(f"{URL}?model={MODEL}", files={"volume": ("jane.nii", scan)})
    (line,) = [line for line in caplog.records if line.name == "app.requests"]
    said = vars(line)
    assert (said["route"], said["status"], said["code"]) == (URL, 200, "ok")
    assert (said["model"], said["bytes"], tuple(said["shape"])) == (MODEL, len(scan), SHAPE)
    assert "jane" not in str(said)


@pytest.fixture(scope="module")
def guarded(models: Path) -> Iterator[TestClient]:
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("user", "admin")}
    settings = toy_settings(models, api_keys=(hashes["user"],), admin_key_hash=hashes["admin"])
    with running(settings) as client:
        yield client


@pytest.mark.parametrize(
    ("key", "models_status", "reload_status"),
    [(None, 401, 401), ("wrong", 401, 401), ("user", 200, 401), ("admin", 200, 200)],
)
def test_key_decides_what_may_be_called(
    key: str | None, models_status: int, reload_status: int, guarded: TestClient
) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    listed = guarded.get("/v1/models", headers=headers)
    reloaded = guarded.post(f"/v1/models/{MODEL}/reload", headers=headers)
    assert (listed.status_code, reloaded.status_code) == (models_status, reload_status)
    for response in (listed, reloaded):
        if response.status_code == 401:
            assert problem_of(response).code == "unauthorized"
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
def test_probes_need_no_key(path: str, guarded: TestClient) -> None:
    assert guarded.get(path).status_code == 200


def test_docs_show_both_ways_to_upload_and_every_problem(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    post = document["paths"][URL]["post"]
    body = post["requestBody"]["content"]
    assert "volume" in body["multipart/form-data"]["schema"]["properties"]
    assert body["application/octet-stream"]["schema"]["format"] == "binary"
    for status in ("400", "413", "415", "422", "429", "503", "504"):
        assert "application/problem+json" in post["responses"][status]["content"]
    assert post["responses"]["200"]["content"]["application/json"]["example"]["landmarks"]
    assert client.get("/docs").status_code == 200
