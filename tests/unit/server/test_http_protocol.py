"""Bodies received in place, over real sockets, on both event loops."""

import asyncio

import pytest
import uvloop

from tests.support.body_services import BODY, LIVENESS, Connection, RunClient, client_runner, post


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run_client(request: pytest.FixtureRequest) -> RunClient:
    return client_runner(request.param)


def test_body_is_received_in_place_and_the_connection_is_reused(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        for number in range(1, 4):
            await connection.send(post("/fill") + BODY)
            assert await connection.status() == 200
            assert connection.service.counted > 0.8 * number * len(BODY)

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


@pytest.mark.parametrize("sent", [1, 70_000, len(BODY) - 1])
def test_disconnect_during_a_body_is_noticed(sent: int, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/fill") + BODY[:sent])
        connection.writer.close()
        await connection.service.left.wait()

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
        await connection.send(post("/wait", "Connection: close") + BODY + b"\r\n\0nothing")
        connection.writer.write_eof()
        await connection.service.left.wait()
        assert await connection.reader.read() == b""

    run_client(client)


def test_buffer_of_another_length_is_refused_and_the_body_discarded(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/fill", length=len(BODY) + 1) + BODY + b"x" + LIVENESS)
        assert [await connection.status() for _ in range(2)] == [406, 200]

    run_client(client)


def test_body_of_unknown_length_is_not_offered(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        head = b"POST /fill HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        await connection.send(head + b"3\r\nabc\r\n0\r\n\r\n")
        assert await connection.status() == 500

    run_client(client)
