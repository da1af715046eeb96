"""A service under chaos keeps its promises, and the ledger of the chaos sees where it does not."""

import asyncio
import csv
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.chaos.attempt import (
    CLOSED,
    EVENT_STREAM,
    REFUSED,
    Answer,
    Attempt,
    make,
    post,
)
from tests.benchmarks.chaos.clients import Kind
from tests.benchmarks.chaos.ledger import Ledger
from tests.benchmarks.loads import LEFT, LOST
from tests.benchmarks.servers import free_port

GOOD = Kind("good", lambda *_: Attempt(b""), frozenset({200}))
GONE = replace(GOOD, name="gone", own=frozenset({LEFT}), others=frozenset())
UNNAMED = replace(GOOD, name="unnamed", own=frozenset({400}), logged=False)


# Not in every run: it takes both cores for two minutes, and other tests take them, too.
@pytest.mark.slow
def test_twenty_seconds_of_chaos_break_no_promise(tmp_path: Path) -> None:
    assert main(["chaos", "--fast", "--results", str(tmp_path)]) == 0
    with (tmp_path / "chaos.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    broken = [
        (row["what"], row["ours"], row["note"]) for row in rows if row["verdict"] == "NOT met"
    ]
    assert broken == []
    assert sum(row["verdict"] == "met" for row in rows) == 7


def answer(*, x: float = 1.0) -> Answer:
    body = {"landmarks": [{"name": "a", "ras_mm": [x, 2.0, 3.0]}]}
    return Answer(200, {"content-type": "application/json"}, json.dumps(body).encode())


def problem(status: int, **headers: str) -> Answer:
    return Answer(status, headers, json.dumps({"status": status}).encode())


def ledger_of(kind: Kind, found: Answer, *logged: int) -> Ledger:
    """Make a ledger with one request, sent from second 1 to 2."""
    ledger = Ledger(expected={"scan": answer().body})
    ledger.add("one", kind, found, "scan", 1.0, 2.0)
    ledger.log += [{"request_id": "one", "status": status} for status in logged]
    return ledger


def faults(ledger: Ledger) -> list[str]:
    outcomes = ledger.odd_outcomes() + ledger.undocumented()
    return outcomes + ledger.mistakes() + ledger.imbalances()


@pytest.mark.parametrize(
    ("kind", "found", "logged"),
    [
        (GOOD, answer(), [200]),
        (GOOD, answer(x=1.0005), [200]),
        (GOOD, problem(429, **{"retry-after": "1"}), [429]),
        (GOOD, problem(504), [504]),
        (GONE, Answer(LEFT), []),
        (GONE, Answer(LEFT), [499]),
    ],
)
def test_ledger_of_what_is_allowed_balances(kind: Kind, found: Answer, logged: list[int]) -> None:
    assert faults(ledger_of(kind, found, *logged)) == []


@pytest.mark.parametrize(
    ("kind", "found", "logged", "fault"),
    [
        (GOOD, problem(500), [500], "good: 500"),
        (GOOD, problem(400), [400], "good: 400"),
        (GOOD, Answer(LOST), [], "good: lost"),
        (GOOD, Answer(CLOSED), [], "good: closed"),
        (GOOD, answer(x=1.01), [200], "good: scan: a: expected"),
        (GOOD, Answer(200, {}, b"{"), [200], "good: scan:"),
        (GOOD, problem(429), [429], "no Retry-After"),
        (GOOD, Answer(503, {}, b"oops"), [503], "no problem"),
        (GOOD, answer(), [], r"good: 200, logged \[\]"),
        (GOOD, answer(), [200, 200], r"good: 200, logged \[200, 200\]"),
        (GOOD, answer(), [499], r"good: 200, logged \[499\]"),
        (GONE, Answer(LEFT), [200, 200], r"gone: left, logged \[200, 200\]"),
        (UNNAMED, problem(400), [], "1 answers without an id, 0 logged"),
        (GONE, answer(), [200], "gone: 200"),
    ],
)
def test_ledger_finds_what_breaks_a_promise(
    kind: Kind, found: Answer, logged: list[int], fault: str
) -> None:
    found_faults = faults(ledger_of(kind, found, *logged))
    assert any(re.search(fault, one) for one in found_faults), found_faults


def test_lost_connections_are_allowed_only_in_a_stop_and_only_of_what_was_not_accepted() -> None:
    ledger = ledger_of(GOOD, Answer(LOST))
    ledger.stops.append((1.5, 9.0))
    assert faults(ledger) == []
    ledger.stops[0] = 2.5, 9.0
    assert ledger.odd_outcomes() == ["good: lost"]
    accepted = ledger_of(GOOD, Answer(LOST), 200)
    accepted.stops.append((1.5, 9.0))
    assert accepted.imbalances() == ["good: lost, logged [200]"]


def test_kinds_that_never_had_their_own_outcome_are_missing() -> None:
    ledger = ledger_of(GOOD, problem(504), 504)
    assert ledger.missing() == ["good"]
    ledger.add("two", GOOD, answer(), "scan", 2.0, 3.0)
    assert ledger.missing() == []


def test_last_event_of_a_stream_is_its_outcome() -> None:
    events = b"event: progress\ndata: {}\n\nevent: %b\ndata: %b\n\n"
    headers = {"content-type": f"{EVENT_STREAM}; charset=utf-8"}
    late = Answer(200, headers, events % (b"problem", b'{"status": 504}'))
    assert late.settle() == (504, {"status": 504})
    assert Answer(200, headers, events % (b"answer", b'{"x": 1}')).settle() == (200, {"x": 1})
    assert Answer(200, headers, events[:30]).settle() == (LOST, None)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def talk(attempt: Attempt, serve: Serve) -> Answer:
    """Make an attempt at a server of one connection."""

    async def scenario() -> Answer:
        served = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(reader, writer)
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            served.set()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            answer = await make(port, "127.0.0.2", attempt, asyncio.Event())
            await served.wait()
        return answer

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            (200, b"ok"),
        ),
        (
            b"HTTP/1.1 503 x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n1\r\n!\r\n0\r\n\r\n",
            (503, b"no!"),
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", (LOST, b"")),
        (b"", (CLOSED, b"")),
    ],
)
def test_client_tells_answers_from_lost_and_closed_connections(
    sent: bytes, expected: tuple[int, bytes]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"whole")
        assert writer.get_extra_info("peername")[0] == "127.0.0.2"
        writer.write(sent)

    found = talk(Attempt(post("/", b"whole", "one")), serve)
    assert (found.status, found.body) == expected


@pytest.mark.parametrize("chunked", [False, True])
def test_client_sends_what_it_is_told_in_pieces_and_leaves(chunked: bool) -> None:
    content = post("/x", bytes(range(256)) * 9, "one", {"Accept": "a"}, chunked=chunked)
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())

    attempt = Attempt(content, share=0.5, pieces=3, then="close half")
    assert talk(attempt, serve).status == CLOSED
    assert received == [content[: len(content) // 2]]
    assert talk(replace(attempt, then="leave"), serve).status == LEFT


def test_client_says_when_nobody_listens() -> None:
    attempt = Attempt(post("/", b"", "one"))
    assert asyncio.run(make(free_port(), "127.0.0.1", attempt, asyncio.Event())).status == REFUSED
