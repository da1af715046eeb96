"""Progress as server-sent events, and refusals before a body is read."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import Message

from app.api import sse
from app.api.request_log import RECORD_KEY, RequestRecord
from app.api.sse import EVENT_STREAM, EventStream, wants_events
from app.engine.host_pool import HostPool
from app.io.volume import HEAD_BYTES
from tests.support import faulty_network as commands
from tests.support.faulty_network import command_scan, faulty_models
from tests.support.faulty_service import TILES, Faulty, code_of
from tests.support.model_folders import TILE
from tests.support.services import PATIENCE_S, until

STREAM = {"Accept": EVENT_STREAM}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    process = Faulty(faulty_models(tmp_path_factory.mktemp("events")), BATCH_SIZE="2")
    yield process
    process.kill()


def events_of(response: httpx.Response) -> list[tuple[str, Any]]:
    assert response.headers["content-type"].startswith(EVENT_STREAM)
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


@pytest.mark.parametrize(
    ("accept", "wants"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("text/event-stream", True),
        ("application/json;q=0.5, Text/Event-Stream; q=1", True),
        ("text/event-stream, application/json", True),
        ("text/event-stream, */*", True),
        ("application/json, text/csv, text/event-stream, application/problem+json", False),
        ("text/event-stream;q=0.5, application/json", False),
        ("text/event-stream;q=0", False),
        ("image/png", False),
    ],
)
def test_event_stream_is_sent_only_if_accept_prefers_it(accept: str | None, wants: bool) -> None:
    assert wants_events(accept) is wants


def test_progress_is_reported_per_tile_and_ends_with_the_answer(service: Faulty) -> None:
    plain = service.ask(command_scan(seed=1)).json()
    events = events_of(service.ask(command_scan(seed=1), **STREAM))
    assert [name for name, _ in events] == ["progress"] * (len(events) - 1) + ["answer"]
    assert events[0][1]["stage"] == "queued"
    told = [data["tile"] for name, data in events if name == "progress"]
    assert told == sorted(told)
    assert {data["tiles"] for _, data in events[1:-1]} == {TILES}
    assert len(events) > 3
    assert events[-1][1]["landmarks"] == plain["landmarks"]


def test_queue_position_is_reported(service: Faulty) -> None:
    with service.held():
        first = service.send(command_scan(seed=2))
        service.queued(TILES)
        second = service.send(command_scan(seed=3), **STREAM)
        service.queued(2 * TILES)
    assert events_of(second.result())[0][1]["ahead"] == 2
    assert first.result().status_code == 200


def test_fault_ends_the_stream_with_its_problem(service: Faulty) -> None:
    name, problem = events_of(service.ask(command_scan(commands.NAN), **STREAM))[-1]
    assert (name, problem["status"], problem["code"]) == ("problem", 500, "network-failed")


def test_stream_whose_work_is_dropped_by_a_stop_ends_with_a_problem() -> None:
    pool, go_on, sent = HostPool("host", 1), threading.Event(), list[bytes]()
    record = RequestRecord("stopped", "POST")

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def scenario() -> None:
        asked = asyncio.Event()

        async def work(_: object) -> bytes:
            asked.set()
            return await pool.run(lambda _: b"", asyncio.get_running_loop().time() + PATIENCE_S)

        pool.submit(lambda: go_on.wait(PATIENCE_S))
        stream = EventStream(work)({RECORD_KEY: record, "type": "http"}, receive, send)
        answering = asyncio.create_task(stream)
        await asked.wait()
        pool.close()
        go_on.set()
        await answering

    asyncio.run(scenario())
    assert sent[-1].startswith(b"event: problem\n")
    assert record.code == "draining"


def test_silence_is_ended_by_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SILENCE_S", 1e-3)
    sent = list[bytes]()

    async def scenario() -> None:
        said = asyncio.Event()

        async def receive() -> Message:
            await asyncio.Event().wait()
            return {}

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))
            if sent[-1].startswith(b":"):
                said.set()

        async def work(_: object) -> bytes:
            await said.wait()
            return b"{}"

        record = RequestRecord("silent", "POST")
        stream = EventStream(work)({RECORD_KEY: record, "type": "http"}, receive, send)
        await asyncio.wait_for(stream, PATIENCE_S)

    asyncio.run(scenario())
    _start, comment, *_more, answer = sent
    assert (comment, answer) == (b":\n\n", b"event: answer\ndata: {}\n\n")


def test_work_is_cancelled_when_the_client_closes_its_stream(service: Faulty) -> None:
    headers = STREAM | {"X-Request-ID": "stream-left"}
    with service.held():
        url = f"{service.url}/v1/landmarks"
        with httpx.stream("POST", url, content=command_scan(seed=4), headers=headers) as stream:
            assert next(stream.iter_lines()) == "event: progress"
        assert service.wait_for(request_id="stream-left")["code"] == "client-left"
        assert service.metric("queue_tiles") == service.metric("scans_preparing") == 0
    until(lambda: service.metric("requests_in_flight") == 0)


def test_file_is_refused_by_its_header_before_the_rest_arrives(service: Faulty) -> None:
    # Seven axes of which the fourth is empty; the rest of the body is never sent.
    broken = bytearray(command_scan(seed=1, shape=(64, 48, 80)))
    broken[40:56] = np.array([4, 64, 48, 80, 0, 1, 1, 1], "<i2").tobytes()
    head = (
        f"POST /v1/landmarks HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(broken)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(head + broken[:HEAD_BYTES])
        assert connection.recv(65_536).startswith(b"HTTP/1.1 422")


def test_deadline_that_cannot_be_met_is_refused_at_once(service: Faulty) -> None:
    assert service.ask(command_scan(seed=1)).status_code == 200
    large = command_scan(seed=1, shape=(200, 150, 200))
    answer = service.client.post("/v1/landmarks?timeout_s=0.002", content=large)
    assert (answer.status_code, code_of(answer)) == (504, "deadline-exceeded")
    assert "tiles, which would take" in answer.json()["detail"]


def test_model_lists_the_measurements_of_its_batches(service: Faulty) -> None:
    for _ in range(2):
        assert service.ask(command_scan(seed=1)).status_code == 200
    rows = service.client.get("/v1/models/faulty").json()["devices"][0]["batches"]
    assert [row["tiles"] for row in rows if row["chosen"]] == [2]
    assert {tuple(row["tile_shape"]) for row in rows} == {TILE}
