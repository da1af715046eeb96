"""Requests and bodies over real sockets, on both event loops, and what is refused of them."""

from itertools import repeat

import pytest

from app.errors import Draining
from app.server.http_protocol import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    MIN_CHUNK_BYTES,
    SMALL_CHUNKS,
)
from tests.support.body_services import BODY, LIVENESS, Connection, RunClient, post

GET = b"GET /echo HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
LONG = b"x" * MAX_HEAD_BYTES
TINY = b"1\r\nx\r\n"


def counted(connection: Connection, code: str) -> bool:
    """Return whether one request was counted under a code."""
    line = f'landmarkd_requests_total{{code="{code}",route="unmatched"}} 1.0'
    return line in connection.service.metrics.render().decode()


@pytest.mark.parametrize(
    "coding", ["gzip, chunked", "gzip,chunked", "gzip\r\nTransfer-Encoding: chunked"]
)
def test_body_that_is_compressed_for_its_transfer_is_refused(
    coding: str, run_client: RunClient
) -> None:
    async def client(connection: Connection) -> None:
        head = CHUNKED.replace(b"Encoding: chunked", b"Encoding: " + coding.encode())
        await connection.send(head + b"1\r\nx\r\n0\r\n\r\n")
        problem = await connection.refusal()
        assert (problem.status, problem.code) == (501, "unknown-coding")
        assert "expected Transfer-Encoding to be chunked, got 'gzip" in problem.detail
        assert counted(connection, "unknown-coding")

    run_client(client)


@pytest.mark.parametrize("coding", [b"CHUNKED", b" chunked "])
def test_chunked_is_known_however_it_is_written(coding: bytes, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        head = CHUNKED.replace(b"Encoding: chunked", b"Encoding: " + coding)
        await connection.send(head + b"1\r\nx\r\n0\r\n\r\n")
        assert await connection.status() == 200

    run_client(client)


def test_connection_is_reused_for_one_body_after_the_other(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        for _ in range(3):
            await connection.send(post("/fill") + BODY)
            assert await connection.status() == 200

    run_client(client)


def test_pipelined_requests_are_answered_in_order(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        connection.writer.write((post("/fill") + BODY) * 2 + LIVENESS + post("/fill") + BODY)
        assert [await connection.status() for _ in range(4)] == [200] * 4

    run_client(client)


def test_body_in_many_chunks_is_received_whole(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/fill"))
        for start in range(0, len(BODY), 100_003):
            await connection.send(BODY[start : start + 100_003])
        assert await connection.status() == 200

    run_client(client)


def test_requests_behind_more_than_may_wait_are_refused_after_those(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(LIVENESS * 10_000)
        assert [await connection.status() for _ in range(1 + MAX_PIPELINED)] == [200] * 9
        problem = await connection.refusal()
        assert (problem.status, problem.code) == (400, "bad-request")
        assert "expected at most 8 requests" in problem.detail

    run_client(client)


@pytest.mark.parametrize("first", [1, 1 << 20])
def test_body_of_too_many_tiny_chunks_is_refused_before_the_rest_is_parsed(
    first: int, run_client: RunClient
) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(CHUNKED + b"%x\r\n%b\r\n" % (first, bytes(first)))
        await connection.service.received.wait()
        await connection.send(TINY * 20 * SMALL_CHUNKS)
        status, text = await connection.answer()
        assert (status, b"expected a body in chunks of 64 bytes or more" in text) == (400, True)
        (server_side,) = connection.service.connections
        assert len(server_side.cycle.body) < 2 * SMALL_CHUNKS
        connection.writer.write_eof()
        assert await connection.reader.read() == b""

    run_client(client)


@pytest.mark.parametrize("size", [MIN_CHUNK_BYTES, 1024, 65_536])
def test_body_in_chunks_as_programs_send_them_is_received_whole(
    size: int, run_client: RunClient
) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(CHUNKED.replace(b"/echo", b"/fill"))
        for start in range(0, len(BODY), size):
            part = BODY[start : start + size]
            await connection.send(b"%x\r\n%b\r\n" % (len(part), part))
        await connection.send(b"0\r\n\r\n")
        assert await connection.status() == 200
        await connection.send(CHUNKED + TINY * (SMALL_CHUNKS - 1) + b"0\r\n\r\n")
        assert await connection.answer() == (200, b"x" * (SMALL_CHUNKS - 1))

    run_client(client)


@pytest.mark.parametrize("header", ["Connection: keep-alive", "Connection: close"])
def test_disconnect_after_a_body_is_noticed(header: str, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/wait", header) + BODY)
        connection.writer.close()
        await connection.service.left.wait()

    run_client(client)


def test_body_that_is_no_longer_awaited_is_discarded(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/impatient") + BODY[:400_000])
        assert await connection.status() == 408
        await connection.send(BODY[400_000:] + LIVENESS + post("/fill") + BODY)
        assert [await connection.status() for _ in range(2)] == [200] * 2

    run_client(client)


def test_body_refused_by_its_first_bytes_is_discarded(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/refuse") + BODY + post("/fill") + BODY)
        assert await connection.status() == 422
        assert await connection.status() == 200

    run_client(client)


def test_client_that_expects_100_gets_it(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/fill", "Expect: 100-continue"))
        assert await connection.status() == 100
        await connection.send(BODY)
        assert await connection.status() == 200

    run_client(client)


def test_bytes_after_the_last_request_are_ignored(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/fill", "Connection: close") + BODY + b"\r\n\0nothing")
        assert await connection.status() == 200
        assert await connection.reader.read() == b""

    run_client(client)


@pytest.mark.parametrize(
    "head",
    [
        GET + b"A: b\r\n" * MAX_FIELDS + b"\r\n",
        GET + b"A: " + LONG + b"\r\n\r\n",
        GET + LONG + b": a\r\n\r\n",
        GET + b"".join(b"A: " + b"b" * 1000 + b"\r\n" for _ in range(70)) + b"\r\n",
        b"GET /" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        CHUNKED + b"3\r\nabc\r\n0\r\n" + b"A: b\r\n" * (MAX_FIELDS + 1) + b"\r\n",
        CHUNKED + b"3\r\nabc\r\n0\r\nA: " + LONG + b"\r\n\r\n",
        CHUNKED + b"3;" + 8 * LONG + b"\r\nabc\r\n0\r\n\r\n",
    ],
    ids=["fields", "value", "name", "sum", "url", "trailers", "trailer", "extension"],
)
def test_head_over_a_limit_is_refused(head: bytes, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(head)
        if head.startswith(CHUNKED):
            status, text = await connection.answer()
            assert (status, b"expected a head of at most" in text) == (431, True)
        else:
            assert (await connection.refusal()).code == "head-too-large"
            assert counted(connection, "head-too-large")

    run_client(client)


@pytest.mark.parametrize(
    "start", [b"", b"GET /", GET, GET + b"A: ", CHUNKED + b"1\r\na\r\n0\r\nA: "]
)
def test_head_that_never_ends_is_refused_when_it_is_over_the_limit(
    start: bytes, run_client: RunClient
) -> None:
    async def client(connection: Connection) -> None:
        filler = b"\r\n" * 500 if start == b"" else b"a" * 1000
        await connection.send(start)
        for piece in repeat(filler, 2 * MAX_HEAD_BYTES // 1000):
            await connection.send(piece)
        assert await connection.status() == 431

    run_client(client)


def test_head_within_the_limits_is_answered_and_trailers_are_no_headers(
    run_client: RunClient,
) -> None:
    async def client(connection: Connection) -> None:
        fields = b"".join(b"A: " + b"b" * 600 + b"\r\n" for _ in range(MAX_FIELDS - 1))
        await connection.send(GET + fields + b"\r\n")
        assert await connection.answer() == (200, b"")
        await connection.send(CHUNKED + b"3\r\nabc\r\n0\r\nX-Request-ID: no\r\n\r\n" + LIVENESS)
        assert await connection.answer() == (200, b"abc")
        assert await connection.status() == 200

    run_client(client)


@pytest.mark.parametrize("upgrade", [H2C, ("Connection: Upgrade", "Upgrade: websocket")])
def test_upgrade_is_ignored_and_the_body_received(
    upgrade: tuple[str, ...], run_client: RunClient
) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/echo", *upgrade, length=3) + b"abc")
        assert await connection.answer() == (200, b"abc")
        fields = "\r\n".join((*upgrade, "Transfer-Encoding: chunked")).encode()
        head = CHUNKED.replace(b"Transfer-Encoding: chunked", fields)
        await connection.send(head + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n" + LIVENESS)
        assert await connection.answer() == (200, b"abc")
        assert await connection.status() == 200
        await connection.send(post("/fill", *upgrade) + BODY + LIVENESS)
        assert [await connection.status(), await connection.status()] == [200, 200]
        await connection.send(
            b"GET /live HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n\r\n0\r\n\r\n" + LIVENESS
        )
        assert [await connection.status(), await connection.status()] == [200, 200]

    run_client(client)


def test_many_upgrades_at_once_are_all_answered(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        head, at_once = post("/live", *H2C, length=0), MAX_PIPELINED + 1
        for _ in range(200):
            connection.writer.write(head * at_once)
            assert {await connection.status() for _ in range(at_once)} == {200}

    run_client(client)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /echo HTTP/1.1\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
def test_host_is_required_once(head: bytes, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(head + LIVENESS)
        problem = await connection.refusal()
        assert (problem.status, problem.code) == (400, "bad-request")
        assert "expected one Host header" in problem.detail

    run_client(client)


def test_old_clients_need_no_host(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(b"GET /echo HTTP/1.0\r\n\r\n")
        assert await connection.status() == 200

    run_client(client)


def test_spaces_around_a_length_are_no_part_of_it(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/echo").replace(b"%d" % len(BODY), b"  3 \t ") + b"abc")
        assert await connection.answer() == (200, b"abc")

    run_client(client)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"GARBAGE\r\n\r\n", "Invalid method"),
        (b"GET /\xff HTTP/1.1\r\n", "in url path"),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", "invalid url b'a:1'"),
        (b"GET http://[" + LONG[:999] + b" HTTP/1.1\r\n\r\n", "invalid url b'http://[x"),
    ],
)
def test_malformed_head_is_a_counted_problem(
    head: bytes, told: str, run_client: RunClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(head)
        problem = await connection.refusal()
        assert (problem.status, problem.code) == (400, "bad-request")
        assert told in problem.detail
        assert len(problem.detail) < 150
        assert counted(connection, "bad-request")

    run_client(client)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_garbage_behind_a_request_does_not_replace_its_answer(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/held", length=3) + b"abc" + LIVENESS + b"GARBAGE\r\n\r\n")
        connection.service.go.set()
        assert await connection.answer() == (200, b"abc")
        assert await connection.status() == 200
        assert (await connection.refusal()).code == "bad-request"

    run_client(client)


@pytest.mark.parametrize(
    "head",
    [
        CHUNKED,
        post("/echo", *H2C).replace(
            b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked"
        ),
    ],
)
def test_malformed_body_is_refused_where_it_is_received(head: bytes, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(head + b"3\r\nabc\r\nzz\r\n")
        status, text = await connection.answer()
        told = b"expected an HTTP/1.1 request, got a malformed one: Invalid character in chunk size"
        assert (status, text) == (400, told)
        assert await connection.reader.read() == b""

    run_client(client)


def test_refused_client_that_expects_100_may_not_send_another_request(
    run_client: RunClient,
) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/live", "Expect: 100-continue"))
        answer = (await connection.reader.read()).lower()
        assert answer.startswith(b"http/1.1 200")
        assert b"\r\nconnection: close\r\n" in answer

    run_client(client)


@pytest.mark.parametrize(
    "sent",
    [post("/fill") + BODY[:70_000], post("/fill") + BODY[:-1], CHUNKED + b"3\r\nabc\r\n"],
    ids=["some", "nearly all", "chunked"],
)
def test_body_that_still_arrives_can_be_refused(sent: bytes, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(sent)
        await connection.service.received.wait()
        for server_side in connection.service.connections:
            server_side.refuse_body(Draining, "stopping")
        assert await connection.answer() == (503, b"stopping")
        assert await connection.reader.read() == b""

    run_client(client)


def test_body_that_has_arrived_is_not_refused(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/held", length=3) + b"abc")
        await connection.service.received.wait()
        for server_side in connection.service.connections:
            server_side.refuse_body(Draining, "stopping")
        connection.service.go.set()
        assert await connection.answer() == (200, b"abc")
        await connection.send(LIVENESS)
        assert await connection.status() == 200

    run_client(client)
