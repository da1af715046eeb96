"""Problems: every failure of a call says what was expected and what was received."""

import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.api.dependencies import hash_key
from app.api.sse import EVENT_STREAM
from app.engine.fair_budget import FairBudget
from app.io.schemas import Problem
from tests.support.services import (
    MODEL,
    RAW,
    admitted,
    problem_of,
    run_asgi,
    running,
    shared_of,
    toy_models,
    toy_scan,
    toy_settings,
)

LIMIT = 1 << 20
URL = "/v1/landmarks"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("problems"))


@pytest.fixture(scope="module")
def client(models: Path) -> Iterator[TestClient]:
    with running(toy_settings(models, max_body_bytes=LIMIT, max_in_flight=2)) as client:
        yield client


@pytest.fixture(scope="module")
def scan() -> bytes:
    return toy_scan()


@pytest.mark.parametrize(
    ("changes", "status", "code", "words"),
    [
        ({"content": b""}, 400, "not-a-volume", "got 0 bytes"),
        ({"content": b"not a volume " * 99}, 400, "not-a-volume", "expected"),
        ({"params": {"model": "nope"}}, 404, "unknown-model", f"one of {MODEL}; got 'nope'"),
        ({"params": {"format": "png"}}, 406, "unknown-format", "got 'png'"),
        ({"headers": {"Accept": "image/png"}}, 406, "unknown-format", "got 'image/png'"),
        ({"content": bytes(LIMIT + 1)}, 413, "too-large", "LANDMARKD_MAX_BODY_BYTES"),
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
        (
            {"headers": {"Content-Type": f"multipart/form-data; boundary={'b' * 257}"}},
            400,
            "bad-request",
            "expected a well-formed",
        ),
        ({"params": {"timeout_s": "-3"}}, 422, "bad-parameter", "timeout_s: "),
        ({"params": {"timeout_s": "nan"}}, 422, "bad-parameter", "timeout_s: "),
        ({"params": {"timeout_s": "1e6"}}, 422, "bad-parameter", "at most 600, got 1e+06"),
        ({"params": {"frame": "-1"}}, 422, "bad-parameter", "frame: "),
        (
            {"params": {"modle": MODEL}},
            422,
            "bad-parameter",
            "unknown parameter 'modle': did you mean 'model'?",
        ),
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
        (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntoy\r\n',
            422,
            "got 'model' (parameters go into the query)",
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
        (gzip.compress(b"--b--\r\n", mtime=0), 415, "not compressed"),
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
        ("GET", "/livez/", 404),  # No redirect, which behind a proxy with TLS would lead out of it.
        ("POST", f"{URL}/", 404),
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
        engine = shared_of(client).engine
        monkeypatch.setattr(type(engine), "readiness", lambda _: 1 / 0)
        response = client.get("/readyz", headers={"X-Request-ID": "abc"})
        monkeypatch.undo()
    problem = problem_of(response)
    assert (problem.status, problem.code, problem.request_id) == (500, "internal", "abc")
    assert "division" not in response.text
    assert any(getattr(line, "request_id", "") == "abc" for line in caplog.records)


def test_unexpected_error_ends_an_event_stream_with_a_problem(
    models: Path,
    scan: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def detect(*_: object, **__: object) -> None:
        raise RuntimeError("Jane Doe")

    with running(toy_settings(models)) as client:
        monkeypatch.setattr(type(shared_of(client).engine), "detect", detect)
        headers = {"Accept": EVENT_STREAM, "X-Request-ID": "abc"}
        response = client.post(URL, content=scan, headers=headers)
        metrics = client.get("/metrics").text
    name, data = response.text.strip().split("\n")
    problem = Problem.model_validate_json(data.removeprefix("data: "))
    assert name == "event: problem"
    assert (problem.status, problem.code, problem.request_id) == (500, "internal", "abc")
    assert "Jane" not in response.text
    assert any(getattr(line, "request_id", "") == "abc" for line in caplog.records)
    assert 'landmarkd_requests_total{code="internal",route="/v1/landmarks"} 1.0' in metrics


def test_request_over_the_limit_gets_429_before_its_body_is_read(client: TestClient) -> None:
    with admitted(client, 2):
        response = client.post(URL, content=b"x", headers=RAW)
    assert problem_of(response).code == "queue-full"
    assert int(response.headers["retry-after"]) >= 1
    assert shared_of(client).engine.admission.requests == 0


@pytest.mark.parametrize(("length", "status"), [(LIMIT + 1, 413), (LIMIT, 429)])
def test_body_that_will_not_fit_is_refused_before_it_arrives(
    length: int, status: int, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_of(client).engine.admission, "body_bytes", FairBudget(LIMIT - 1))
    headers = RAW | {"Host": "localhost", "Content-Length": str(length)}
    assert run_asgi(client, URL, headers=headers)[0]["status"] == status


def test_slow_body_is_answered_408(models: Path) -> None:
    with running(toy_settings(models, body_timeout_s=0.05)) as client:
        sent = run_asgi(client, URL)
    assert sent[0]["status"] == 408


@pytest.fixture(scope="module")
def guarded(models: Path) -> Iterator[TestClient]:
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("user", "admin")}
    keys = (f"anna:{hashes['user']}", hash_key("nameless"))
    settings = toy_settings(models, api_keys=keys, admin_key_hash=hashes["admin"])
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


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (None, None),
        ("wrong", None),
        ("user", "anna"),
        ("nameless", hash_key("nameless")[:8]),
        ("admin", "admin"),
    ],
)
def test_log_line_names_the_key_that_a_call_has_shown(
    key: str | None, name: str | None, guarded: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app.requests")
    guarded.get("/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    (line,) = [line for line in caplog.records if line.name == "app.requests"]
    assert vars(line).get("key") == name


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_probes_need_no_key(path: str, guarded: TestClient) -> None:
    assert guarded.get(path).status_code == 200
