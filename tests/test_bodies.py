"""Bodies received in place: over real sockets, on both event loops, whatever the client does."""

import asyncio
import gc
from asyncio import AbstractEventLoop, StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import numpy as np
import pytest
import uvloop
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from app.bodies import DirectBodyProtocol, fill_body_of, reserve_of
from app.buffers import Buffers

BODY = np.random.default_rng(5).bytes(3 << 20)
OTHER = np.random.default_rng(6).bytes(len(BODY))
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
IMPATIENT_S = 0.3


def post(path: str, *headers: str, length: int = len(BODY)) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers, "", "")
    return "\r\n".join(lines).encode()


@dataclass
class Service:
    """An application that does with a body what the path says.

    Attributes:
        left: Is set when it has seen a client leave.
        counted: Bytes that have come in place.
        buffers: What bodies are received into.
        places: Where in memory they were.
    """

    left: asyncio.Event = field(default_factory=asyncio.Event)
    counted: int = 0
    buffers: Buffers = field(default_factory=Buffers)
    places: list[int] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200 if all is well."""
        try:
            status = await self._do(scope, receive)
        except TimeoutError:
            status = HTTPStatus.REQUEST_TIMEOUT
        except ValueError:
            status = HTTPStatus.NOT_ACCEPTABLE
        except ClientDisconnect:
            self.left.set()
            return
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def _do(self, scope: Scope, receive: Receive) -> HTTPStatus:
        path = scope["path"]
        if path == "/live":
            return HTTPStatus.OK
        first = (await receive())["body"]
        if path == "/refuse":
            return HTTPStatus.UNPROCESSABLE_ENTITY
        async with asyncio.timeout(IMPATIENT_S if path == "/impatient" else None):
            body = await self._fill(scope, first)
        if path == "/wait":
            assert (await receive())["type"] == "http.disconnect"
            raise ClientDisconnect
        sent = OTHER if path == "/other" else BODY
        return HTTPStatus.OK if body == sent else HTTPStatus.BAD_REQUEST

    async def _fill(self, scope: Scope, first: bytes) -> memoryview:
        fill = fill_body_of(scope)
        assert fill is not None
        content = reserve_of(scope)(len(BODY))
        self.places.append(np.asarray(content).ctypes.data)
        content[: len(first)] = first
        await fill(content[len(first) :], self._count)
        return content

    def _count(self, size: int) -> None:
        self.counted += size


@dataclass(frozen=True)
class Talk:
    """A client's side of a connection to a service."""

    service: Service
    reader: StreamReader
    writer: StreamWriter

    async def again(self) -> "Talk":
        """Open another connection to the same service."""
        address = self.writer.get_extra_info("peername")
        return Talk(self.service, *await asyncio.open_connection(*address))

    async def send(self, content: bytes) -> None:
        """Send bytes, and wait until the system has taken nearly all of them."""
        self.writer.write(content)
        await self.writer.drain()

    async def status(self) -> int:
        """Wait for the next answer, and read its status."""
        return int((await self.reader.readuntil(b"\r\n\r\n")).split()[1])


Play = Callable[[Callable[[Talk], Awaitable[None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Play:
    new_loop: Callable[[], AbstractEventLoop] = request.param

    async def talk(client: Callable[[Talk], Awaitable[None]]) -> None:
        service = Service()
        config = Config(service, lifespan="off", log_config=None)

        class Protocol(DirectBodyProtocol):
            buffers = service.buffers

        server = await asyncio.get_running_loop().create_server(
            lambda: Protocol(config, ServerState(), {}), "127.0.0.1", 0
        )
        address = server.sockets[0].getsockname()
        async with server, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(*address)
            await client(Talk(service, reader, writer))
            writer.close()

    def run(client: Callable[[Talk], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(talk(client))

    return run


def test_body_is_received_in_place_and_the_connection_used_again(play: Play) -> None:
    async def client(talk: Talk) -> None:
        for turn in range(1, 4):
            await talk.send(post("/fill") + BODY)
            assert await talk.status() == 200
            assert talk.service.counted > 0.8 * turn * len(BODY)

    play(client)


def test_requests_right_behind_a_body_are_answered_in_turn(play: Play) -> None:
    async def client(talk: Talk) -> None:
        talk.writer.write((post("/fill") + BODY) * 2 + LIVE + post("/fill") + BODY)
        assert [await talk.status() for _ in range(4)] == [200] * 4

    play(client)


def test_body_that_comes_in_many_pieces_is_received_whole(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill"))
        for start in range(0, len(BODY), 100_003):
            await talk.send(BODY[start : start + 100_003])
        assert await talk.status() == 200

    play(client)


@pytest.mark.parametrize("sent", [1, 70_000, len(BODY) - 1])
def test_client_that_leaves_in_the_middle_is_noticed(sent: int, play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill") + BODY[:sent])
        talk.writer.close()
        await talk.service.left.wait()

    play(client)


@pytest.mark.parametrize("header", ["Connection: keep-alive", "Connection: close"])
def test_client_that_leaves_after_its_body_is_noticed(header: str, play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/wait", header) + BODY)
        talk.writer.close()
        await talk.service.left.wait()

    play(client)


def test_body_that_nobody_waits_for_any_more_is_passed_over(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/impatient") + BODY[:400_000])
        assert await talk.status() == 408
        await talk.send(BODY[400_000:] + LIVE + post("/fill") + BODY)
        assert [await talk.status() for _ in range(2)] == [200] * 2

    play(client)


def test_body_refused_by_its_first_bytes_is_passed_over(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/refuse") + BODY + post("/fill") + BODY)
        assert await talk.status() == 422
        assert await talk.status() == 200

    play(client)


def test_client_that_expects_100_is_told_to_send(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill", "Expect: 100-continue"))
        assert await talk.status() == 100
        await talk.send(BODY)
        assert await talk.status() == 200

    play(client)


def test_bytes_behind_the_last_request_are_no_request(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/wait", "Connection: close") + BODY + b"\r\n\0nothing")
        talk.writer.write_eof()
        await talk.service.left.wait()
        assert await talk.reader.read() == b""

    play(client)


def test_room_that_does_not_fit_is_refused_and_the_body_passed_over(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill", length=len(BODY) + 1) + BODY + b"x" + LIVE)
        assert [await talk.status() for _ in range(2)] == [406, 200]

    play(client)


def test_body_of_unknown_length_is_not_offered(play: Play) -> None:
    async def client(talk: Talk) -> None:
        head = b"POST /fill HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        await talk.send(head + b"3\r\nabc\r\n0\r\n\r\n")
        assert await talk.status() == 500

    play(client)


def test_memory_of_one_body_is_used_for_the_next_which_comes_whole(play: Play) -> None:
    async def client(talk: Talk) -> None:
        for path, body in (("/fill", BODY), ("/other", OTHER)) * 2:
            await talk.send(post(path) + body)
            assert await talk.status() == 200
        assert len(talk.service.places) == 4
        assert len(set(talk.service.places)) == 1

    play(client)


def test_bodies_side_by_side_do_not_meet(play: Play) -> None:
    async def client(talk: Talk) -> None:
        for _ in range(2):
            await talk.send(post("/fill") + BODY[:1_500_000])
            other = await talk.again()
            await other.send(post("/other") + OTHER)
            assert await other.status() == 200
            other.writer.close()
            await talk.send(BODY[1_500_000:])
            assert await talk.status() == 200
        assert len(set(talk.service.places)) == 2

    play(client)


def test_memory_of_a_body_given_up_is_used_only_when_nothing_comes_into_it(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/impatient") + BODY[:400_000])
        assert await talk.status() == 408
        other = await talk.again()
        await other.send(post("/other") + OTHER[:1_000_000])
        await talk.send(BODY[400_000:] + LIVE)
        assert await talk.status() == 200
        await other.send(OTHER[1_000_000:])
        assert await other.status() == 200
        other.writer.close()
        assert len(set(talk.service.places)) == 1

    play(client)


def test_requests_leave_nothing_to_the_garbage_collector(play: Play) -> None:
    async def client(talk: Talk) -> None:
        for path, status in (("/fill", 200), ("/refuse", 422)) * 2:
            await talk.send(post(path) + BODY)
            assert await talk.status() == status
        leaver = await talk.again()
        await leaver.send(post("/fill") + BODY[:400_000])
        leaver.writer.close()
        await talk.service.left.wait()
        await talk.send(LIVE)
        assert await talk.status() == 200
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (RequestResponseCycle, DirectBodyProtocol, memoryview)
        assert [held for held in gc.garbage if isinstance(held, kinds)] == []

    gc.collect()
    gc.disable()
    try:
        play(client)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("sent", [1, 1_300_000])
def test_memory_of_a_client_that_left_is_used_again(sent: int, play: Play) -> None:
    async def client(talk: Talk) -> None:
        leaver = await talk.again()
        await leaver.send(post("/fill") + BODY[:sent])
        leaver.writer.close()
        await talk.service.left.wait()
        await talk.send(post("/other") + OTHER)
        assert await talk.status() == 200
        assert len(set(talk.service.places)) == 1

    play(client)
