"""Buffers of bodies: never shared, and freed with their request."""

import gc

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.server.http_protocol import HttpProtocol
from tests.support.body_services import (
    BODY,
    LIVENESS,
    OTHER,
    Client,
    Connection,
    RunClient,
    post,
)
from tests.support.memory import without_garbage_collection


def test_bodies_received_side_by_side_do_not_mix(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/fill") + BODY[:1_500_000])
        other = await connection.open_another()
        await other.send(post("/other") + OTHER)
        assert await other.status() == 200
        other.writer.close()
        await connection.send(BODY[1_500_000:])
        assert await connection.status() == 200
        assert len(connection.service.buffers) == 2

    run_client(client)


def test_answered_body_is_freed(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/fill") + BODY)
        assert await connection.status() == 200
        assert connection.service.buffers_alive() == 0

    run_uncollected(run_client, client)


def test_body_given_up_is_freed_while_its_rest_still_arrives(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/impatient") + BODY[:400_000])
        assert await connection.status() == 408
        assert connection.service.buffers_alive() == 0
        await connection.send(BODY[400_000:] + LIVENESS)
        assert await connection.status() == 200

    run_uncollected(run_client, client)


@pytest.mark.parametrize("sent", [1, 1_300_000])
def test_body_of_a_client_that_left_is_freed(sent: int, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        leaver = await connection.open_another()
        await leaver.send(post("/fill") + BODY[:sent])
        leaver.writer.close()
        await connection.service.left.wait()
        await connection.send(LIVENESS)
        assert await connection.status() == 200
        assert connection.service.buffers_alive() == 0

    run_uncollected(run_client, client)


def test_requests_leave_nothing_to_the_garbage_collector(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        for path, status in (("/fill", 200), ("/refuse", 422)) * 2:
            await connection.send(post(path) + BODY)
            assert await connection.status() == status
        leaver = await connection.open_another()
        await leaver.send(post("/fill") + BODY[:400_000])
        leaver.writer.close()
        await connection.service.left.wait()
        await connection.send(LIVENESS)
        assert await connection.status() == 200
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (RequestResponseCycle, HttpProtocol, memoryview)
        assert [held for held in gc.garbage if isinstance(held, kinds)] == []

    run_uncollected(run_client, client)


def run_uncollected(run_client: RunClient, client: Client) -> None:
    with without_garbage_collection():
        try:
            run_client(client)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
