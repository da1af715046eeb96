"""What connections hold: bodies, freed with their request, and what their clients do not read."""

import asyncio
import fcntl
import gc
import sys
from typing import Final

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.server.connection import UNSENT_BYTES
from app.server.http_protocol import MAX_HEAD_BYTES, HttpProtocol
from tests.support.body_services import (
    BODY,
    LIVENESS,
    OTHER,
    Client,
    Connection,
    RunClient,
    ShortProtocol,
    post,
)
from tests.support.memory import without_garbage_collection

SIOCOUTQNSD: Final = 0x894B
"""Of Linux: asks for the bytes of a socket that have not been sent."""


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


def test_heads_that_wait_are_limited_together(run_client: RunClient) -> None:
    """Eight of 64 KiB each waited on every connection, and no limit knew of them."""
    head = LIVENESS[:-2] + b"X-Long: " + b"x" * (MAX_HEAD_BYTES // 3) + b"\r\n\r\n"

    async def client(connection: Connection) -> None:
        await connection.send(head * 4)
        assert [await connection.status() for _ in range(3)] == [200] * 3
        problem = await connection.refusal()
        assert (problem.status, problem.code) == (431, "head-too-large")
        assert "bytes together of the requests that wait" in problem.detail

    run_client(client)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what it holds")
def test_response_that_is_not_read_takes_little_of_the_system(
    run_client: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took megabytes, and kept them until the connection closed, 75 s later."""
    monkeypatch.setattr(ShortProtocol, "read_timeout_s", 60)

    async def client(connection: Connection) -> None:
        await connection.send(post("/large", length=0))
        await connection.reader.readexactly(1000)
        (sender,) = connection.service.connections
        held = -1  # Until the buffers of both systems are full.
        while not sender.flow.write_paused or held != unsent_bytes(sender):
            held = unsent_bytes(sender)
            await asyncio.sleep(0.1)
        assert held + sender.transport.get_write_buffer_size() <= 3 * UNSENT_BYTES

    run_client(client)


def unsent_bytes(sender: HttpProtocol) -> int:
    """Return what the system holds that it has not sent yet."""
    content = bytearray(4)
    descriptor = sender.transport.get_extra_info("socket").fileno()
    fcntl.ioctl(descriptor, SIOCOUTQNSD, content)
    return int.from_bytes(content, sys.byteorder)


def run_uncollected(run_client: RunClient, client: Client) -> None:
    with without_garbage_collection():
        try:
            run_client(client)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
