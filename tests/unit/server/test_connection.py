"""Time limits of a connection, and clients that close it, over real sockets and on both loops."""

import asyncio
import socket
import time

import pytest

from app.api.middleware import SEND_BYTES
from app.server import http_protocol
from app.server.connection import RESET
from tests.support.body_services import (
    BODY,
    LARGE,
    LIVENESS,
    STREAM,
    Connection,
    RunClient,
    ShortProtocol,
    post,
)


def test_stream_to_http_1_0_is_not_chunked_and_ends_with_its_connection(
    run_client: RunClient,
) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = (await connection.reader.read()).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert body == b"".join(STREAM)
        another = await connection.open_another()
        await another.send(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n" + LIVENESS)
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*STREAM, b""))
        assert chunks in await another.reader.readuntil(chunks)
        assert await another.status() == 200
        another.writer.close()

    run_client(client)


def test_client_that_has_closed_its_half_is_answered(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        connection.writer.write(post("/echo", length=3) + b"abc" + post("/held", length=3) + b"def")
        connection.writer.write_eof()
        assert await connection.answer() == (200, b"abc")
        connection.service.go.set()
        assert await connection.answer() == (200, b"def")
        assert await connection.reader.read() == b""

    run_client(client)


def test_client_that_has_closed_its_half_waits_as_long_as_it_takes(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        connection.writer.write(post("/held", length=3) + b"abc")
        connection.writer.write_eof()
        for _ in range(2):
            assert await connection.status() == 100  # To find out whether it has left.
        connection.service.go.set()
        while (status := await connection.status()) == 100:
            pass
        assert (status, await connection.reader.readexactly(3)) == (200, b"abc")

    run_client(client)


def test_client_that_has_closed_its_half_gets_all_of_a_large_response(
    run_client: RunClient,
) -> None:
    async def client(connection: Connection) -> None:
        connection.writer.write(post("/large", length=0))
        connection.writer.write_eof()
        assert await connection.answer() == (200, LARGE)

    run_client(client)


@pytest.mark.parametrize("sent", [b"", b"GET /li", post("/echo") + b"abc", LIVENESS])
def test_connection_closes_with_its_client_if_nothing_is_to_be_answered(
    sent: bytes, run_client: RunClient
) -> None:
    async def client(connection: Connection) -> None:
        connection.writer.write(sent)
        if sent == LIVENESS:
            assert await connection.status() == 200
        connection.writer.write_eof()
        assert await connection.reader.read() == b""
        await connection.service.lost.wait()

    run_client(client)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("behind", [LIVENESS, post("/fill") + b"x"], ids=["whole", "unfinished"])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_disconnect_is_noticed_while_other_requests_wait(
    behind: bytes, apart: bool, reset: bool, run_client: RunClient
) -> None:
    async def client(connection: Connection) -> None:
        first = post("/wait", length=3) + b"abc"
        await connection.send(first + (b"" if apart else behind))
        await connection.service.received.wait()
        if apart:
            await connection.send(behind)
        await connection.service.queued.wait()
        if reset:
            connection.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, RESET
            )
        connection.writer.close()
        await connection.service.left.wait()
        await connection.service.lost.wait()

    run_client(client)


def test_head_has_to_arrive_in_time(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(LIVENESS)
        assert await connection.status() == 200
        await connection.send(LIVENESS[:-1])
        start = time.monotonic()
        assert await connection.reader.read() == b""
        assert time.monotonic() - start < 3 * ShortProtocol.head_timeout_s

    run_client(client)


def test_connection_is_kept_only_while_there_are_few(
    run_client: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_KEPT", 2)

    async def client(connection: Connection) -> None:
        second = await connection.open_another()
        await second.send(LIVENESS)
        assert await second.status() == 200
        third = await connection.open_another()
        await third.send(LIVENESS)
        assert b"connection: close\r\n" in await third.reader.readuntil(b"\r\n\r\n")
        third.writer.close()
        await connection.service.lost.wait()
        await second.send(LIVENESS)
        assert await second.status() == 200
        second.writer.close()

    run_client(client)


def test_connection_that_was_idle_longest_makes_room(
    run_client: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client that opened connections again and again, and sent nothing, had all there are."""
    monkeypatch.setattr(ShortProtocol, "max_open", 3)
    monkeypatch.setattr(ShortProtocol, "head_timeout_s", 60)

    async def client(connection: Connection) -> None:
        await connection.send(post("/held", length=3) + b"abc")
        await connection.service.received.wait()
        first = await connection.open_another()
        kept = await connection.open_another()
        for one in (first, kept):
            await one.send(LIVENESS)
            assert await one.status() == 200
            await asyncio.sleep(0.01)  # uvloop's clock has milliseconds.
        another = await connection.open_another()
        assert await first.reader.read() == b""
        for one in (kept, another):
            await one.send(LIVENESS)
            assert await one.status() == 200
        connection.service.go.set()
        assert await connection.answer() == (200, b"abc")
        for one in (first, kept, another):
            one.writer.close()

    run_client(client)


def test_connection_whose_client_does_not_read_makes_room(
    run_client: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client that asked for the page again and again, and read nothing, had all there are."""
    monkeypatch.setattr(ShortProtocol, "max_open", 2)
    monkeypatch.setattr(ShortProtocol, "read_timeout_s", 60)

    async def client(connection: Connection) -> None:
        await connection.send(post("/held", length=3) + b"abc")
        await connection.service.received.wait()
        (held,) = connection.service.connections
        unread = await connection.open_another()
        await unread.send(post("/large", length=0))
        await unread.reader.readexactly(1000)
        (sender,) = connection.service.connections - {held}
        unsent = -1  # Until the buffers of both systems are full.
        while not sender.flow.write_paused or unsent != sender.transport.get_write_buffer_size():
            unsent = sender.transport.get_write_buffer_size()
            await asyncio.sleep(0.1)
        another = await connection.open_another()
        await another.send(LIVENESS)
        assert await another.status() == 200
        with pytest.raises(ConnectionResetError):
            await unread.reader.read()
        connection.service.go.set()
        assert await connection.answer() == (200, b"abc")
        for one in (unread, another):
            one.writer.close()

    run_client(client)


def test_refused_client_that_goes_on_sending_can_read_why(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/refuse", "Connection: close"))
        for start in range(0, len(BODY), 100_000):
            await connection.send(BODY[start : start + 100_000])
        assert await connection.status() == 422
        assert await connection.reader.read() == b""

    run_client(client)


def test_refused_body_is_discarded_as_long_as_it_keeps_coming(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/refuse", length=50) + b"x")
        assert await connection.status() == 422
        for _ in range(49):
            await asyncio.sleep(ShortProtocol.head_timeout_s / 25)
            await connection.send(b"x")
        await connection.send(LIVENESS)
        assert await connection.status() == 200

    run_client(client)


def test_refused_body_that_stops_loses_its_connection(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/refuse", length=50) + b"x")
        assert await connection.status() == 422
        assert await connection.reader.read() == b""

    run_client(client)


def test_response_that_is_not_read_is_given_up(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/large", length=0))
        await connection.reader.readexactly(1000)
        # The stream holds little and then stops reading its socket.
        await connection.service.lost.wait()
        with pytest.raises(ConnectionResetError):
            await connection.reader.read()
        other = await connection.open_another()
        await other.send(LIVENESS)
        assert await other.status() == 200
        counted = connection.service.metrics.render().decode()
        assert 'landmarkd_requests_total{code="client-left",route="unmatched"} 1.0' in counted
        other.writer.close()

    run_client(client)


def test_response_that_is_read_slowly_is_sent_whole_and_held_once(run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/large", length=0))
        parts, unsent = [await connection.reader.readuntil(b"\r\n\r\n")], []
        while sum(map(len, parts[1:])) < len(LARGE):
            parts.append(await connection.reader.read(1 << 20))
            (server_side,) = connection.service.connections
            unsent.append(server_side.transport.get_write_buffer_size())
            await asyncio.sleep(ShortProtocol.read_timeout_s / 50)
        assert b"".join(parts[1:]) == LARGE
        assert max(unsent) <= SEND_BYTES

    run_client(client)


@pytest.mark.parametrize("sent", [1, 70_000, len(BODY) - 1])
def test_disconnect_during_a_body_is_noticed(sent: int, run_client: RunClient) -> None:
    async def client(connection: Connection) -> None:
        await connection.send(post("/fill") + BODY[:sent])
        connection.writer.close()
        await connection.service.left.wait()

    run_client(client)
