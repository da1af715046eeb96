"""What all responses have in common."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from app.api.middleware import SEND_BYTES, RequestTracking
from app.engine import Metrics
from app.io import Problem
from tests.support.services import RAW, problem_of, running, scope_of, toy_models, toy_settings


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    settings = toy_settings(toy_models(tmp_path_factory.mktemp("middleware")))
    with running(settings) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/metrics", "/", "/v1/models", "/page/page.js"]
)
def test_head_is_answered_as_get_without_the_body(path: str, client: TestClient) -> None:
    got, head = client.get(path), client.head(path)
    assert (got.status_code, head.status_code) == (200, 200)
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"]
    assert not head.content


def test_head_of_what_is_only_posted_is_refused(client: TestClient) -> None:
    assert client.head("/v1/landmarks").status_code == 405


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/landmarks", "POST"),
        ("/v1/jobs/{job}", "GET, HEAD, DELETE"),
        ("/v1/uploads/{upload}", "GET, HEAD, PATCH, DELETE"),
        ("/v1/cases", "GET, HEAD, POST"),
    ],
)
def test_a_wrong_method_is_told_all_that_its_path_has(
    path: str, methods: str, client: TestClient
) -> None:
    response = client.put(path)
    assert problem_of(response).detail == f"expected {methods}; got PUT"
    assert (response.status_code, response.headers["allow"]) == (405, methods)


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/metrics", "/nowhere", "/docs"])
def test_no_browser_may_guess_a_media_type(path: str, client: TestClient) -> None:
    assert client.get(path).headers["x-content-type-options"] == "nosniff"
    problem = client.post("/v1/landmarks", content=b"no scan", headers=RAW)
    assert problem_of(problem).status == 400
    assert problem.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("size", [0, 1, SEND_BYTES, SEND_BYTES + 1, 3 * SEND_BYTES - 1])
def test_large_body_is_sent_in_pieces(size: int) -> None:
    body, sent = hashlib.shake_128(b"").digest(size), list[Message]()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(RequestTracking(app, Metrics())(scope_of("/"), receive, send))
    parts = sent[1:]
    assert b"".join(part["body"] for part in parts) == body
    assert all(0 < len(part["body"]) <= SEND_BYTES for part in parts) or size == 0
    more = [part.get("more_body", False) for part in parts]
    assert more == [True] * (len(parts) - 1) + [False]


def test_request_that_outlasts_the_stop_of_the_server_is_told_to_go_elsewhere() -> None:
    """The server cancels what is still in work a few seconds after the engine has stopped."""
    sent: list[Message] = []

    async def scenario() -> None:
        begun = asyncio.Event()

        async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
            begun.set()
            await asyncio.Event().wait()

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        request = RequestTracking(app, Metrics())(scope_of("/"), receive, send)
        running = asyncio.ensure_future(request)
        await begun.wait()
        running.cancel()
        await running

    asyncio.run(scenario())
    head, body = sent
    assert head["status"] == 503
    assert Problem.model_validate_json(body["body"]).code == "draining"


def test_parameter_names_are_quoted_in_short(client: TestClient) -> None:
    response = client.post(f"/v1/votes?{'x' * 5000}=1", content=b"", headers=RAW)
    assert problem_of(response).code == "bad-parameter"
    assert len(response.content) < 1000


def test_parameter_that_is_given_twice_is_refused(client: TestClient) -> None:
    """Its last value would count, and the landmarks might be another model's."""
    response = client.post("/v1/landmarks?model=skull&frame=1&model=spine", content=b"")
    problem = problem_of(response)
    assert (problem.code, problem.detail) == (
        "bad-parameter",
        "query.model: expected once, got it again",
    )


@pytest.mark.parametrize("name", ["%C3%A4", "%FF", "\N{GREEK SMALL LETTER ALPHA}"])
def test_parameter_outside_ascii_is_read(name: str, client: TestClient) -> None:
    """As UTF-8, as clients encode it; what is not counts as an unknown name."""
    assert client.get(f"/v1/models?{name}=1").status_code == 200
    assert problem_of(client.get(f"/v1/models?{name}=1&{name}=2")).code == "bad-parameter"
    unknown = client.post(f"/v1/landmarks?model={name}", content=b"", headers=RAW)
    assert problem_of(unknown).code == "unknown-model"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("&".join(f"{number:x}=" for number in range(9000)), {}),
        ("", {"accept": "," * 60_000}),
        ("", {"accept": "text/csv" + ";q=1" * 10_000}),
        ("", {"content-type": "multipart/form-data" + ";" * 60_000}),
        ("", [("accept", "text/csv" + ",*/*" * 50)] * 2),
    ],
    ids=["query", "accept", "qualities", "content-type", "lines"],
)
def test_head_of_lists_that_take_long_to_parse_is_refused(
    method: str,
    query: str,
    headers: dict[str, str] | list[tuple[str, str]],
    client: TestClient,
) -> None:
    response = client.request(method, f"/v1/landmarks?{query}", headers=headers)
    problem = problem_of(response)
    assert (problem.status, problem.code) == (431, "head-too-large")
    assert len(response.content) < 1000


def test_head_of_lists_as_long_as_browsers_send_is_answered(client: TestClient) -> None:
    accept = {"accept": ", ".join(f"text/x-{number};q=0.{number}" for number in range(90))}
    query = "&".join(f"p{number}=" for number in range(100))
    response = client.get(f"/v1/models?{query}", headers=accept | {"content-type": "a/b"})
    assert response.status_code == 200


def test_keys_guard_all_but_whether_the_service_is_ready(tmp_path: Path) -> None:
    key = "correct horse"
    settings = toy_settings(
        toy_models(tmp_path), api_keys=(hashlib.sha256(key.encode()).hexdigest(),)
    )
    with running(settings) as client:
        for path in ("/metrics", "/openapi.json"):
            assert problem_of(client.get(path)).code == "unauthorized"
            assert client.get(path, headers={"Authorization": f"Bearer {key}"}).is_success
        for path in ("/livez", "/", "/docs"):  # Which show nothing of the service.
            assert client.get(path).is_success
        assert client.get("/readyz").json() == {"ready": True, "reason": "ready", "models": {}}
        for wrong in ({}, {"Authorization": "Bearer wrong"}):
            assert client.get("/readyz", headers=wrong).json()["models"] == {}
        told = client.get("/readyz", headers={"Authorization": f"Bearer {key}"}).json()
        assert told["models"] == {"toy": "ready"}


def test_reason_why_a_guarded_service_is_not_ready_needs_a_key(tmp_path: Path) -> None:
    settings = toy_settings(tmp_path, api_keys=(hashlib.sha256(b"key").hexdigest(),))
    with running(settings) as client:
        response = client.get("/readyz")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "reason": "not ready", "models": {}}
        told = client.get("/readyz", headers={"Authorization": "Bearer key"}).json()
        assert told["reason"] == "no usable model"
