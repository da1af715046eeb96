"""A service that receives bodies, and a client of it, on any event loop."""

import asyncio
import weakref
from asyncio import AbstractEventLoop, StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from app.api.middleware import RequestTracking
from app.engine import Metrics
from app.errors import LandmarkdError
from app.io.schemas import Problem
from app.server.http_protocol import HttpProtocol

BODY = np.random.default_rng(5).bytes(3 << 20)
OTHER = np.random.default_rng(6).bytes(len(BODY))
LIVENESS = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = bytes(range(256)) * (64 << 10)
STREAM = (b"one\n", b"two\n")
IMPATIENT_S = 0.3


def post(path: str, *headers: str, length: int = len(BODY)) -> bytes:
    """Write the head of a request."""
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers, "", "")
    return "\r\n".join(lines).encode()


@dataclass
class Service:
    """An application that handles a body as its path says.

    Attributes:
        left: Is set when it has seen a client leave.
        buffers: Weak references to the memory that bodies were received into.
        received: Is set when a part of a body has been received.
        go: Until it is set, ``/held`` does not answer.
        queued: Is set when a request waits behind another one.
        lost: Is set when a connection has ended.
        metrics: Counts the requests.
        connections: Of the server.
    """

    left: asyncio.Event = field(default_factory=asyncio.Event)
    buffers: list[weakref.ref[np.ndarray]] = field(default_factory=list)
    received: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    queued: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: Metrics = field(default_factory=Metrics)
    connections: set[HttpProtocol] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200 if the body is as expected, with the body itself, or with a stream."""
        answer = b""
        if scope["path"] == "/stream":
            await self._stream(send)
            return
        try:
            if scope["path"] in {"/echo", "/large", "/held"}:
                status, answer = HTTPStatus.OK, await self._answer(scope, receive)
            else:
                status = await self._do(scope, receive)
        except TimeoutError:
            status = HTTPStatus.REQUEST_TIMEOUT
        except ValueError:
            status = HTTPStatus.NOT_ACCEPTABLE
        except ClientDisconnect:
            self.left.set()
            return
        except LandmarkdError as error:
            status, answer = HTTPStatus(error.status), str(error).encode()
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": []})
        for part in STREAM:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message["body"]
            self.received.set()
            more = message["more_body"]
        if scope["path"] == "/held":
            await self.go.wait()
        return LARGE if scope["path"] == "/large" else body

    async def _do(self, scope: Scope, receive: Receive) -> HTTPStatus:
        path = scope["path"]
        if path == "/live":
            return HTTPStatus.OK
        if path == "/refuse":
            await receive()
            return HTTPStatus.UNPROCESSABLE_ENTITY
        async with asyncio.timeout(IMPATIENT_S if path == "/impatient" else None):
            body = await self._fill(receive)
        if path == "/wait":
            assert (await receive())["type"] == "http.disconnect"
            raise ClientDisconnect
        sent = OTHER if path == "/other" else BODY
        return HTTPStatus.OK if body == sent else HTTPStatus.BAD_REQUEST

    async def _fill(self, receive: Receive) -> memoryview:
        buffer = np.empty(len(BODY), dtype=np.uint8)
        self.buffers.append(weakref.ref(buffer))
        rest, more = buffer.data, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            rest[: len(message["body"])] = message["body"]
            rest, more = rest[len(message["body"]) :], message["more_body"]
            self.received.set()
        return buffer.data

    def buffers_alive(self) -> int:
        """Count the bodies that are still in memory."""
        return sum(buffer() is not None for buffer in self.buffers)


@dataclass(frozen=True)
class Connection:
    """A client's side of a connection to a service."""

    service: Service
    reader: StreamReader
    writer: StreamWriter

    async def open_another(self) -> "Connection":
        """Open another connection to the same service."""
        address = self.writer.get_extra_info("peername")
        return Connection(self.service, *await asyncio.open_connection(*address))

    async def send(self, content: bytes) -> None:
        """Send bytes, and wait until the system has taken nearly all of them."""
        self.writer.write(content)
        await self.writer.drain()

    async def status(self) -> int:
        """Wait for the next answer, and read its status."""
        return (await self._head())[0]

    async def answer(self) -> tuple[int, bytes]:
        """Wait for the next answer, and read its status and body."""
        status, headers = await self._head()
        return status, await self.reader.readexactly(int(headers["content-length"]))

    async def refusal(self) -> Problem:
        """Wait for an answer that is a problem and the last of the connection."""
        status, headers = await self._head()
        assert headers["content-type"] == "application/problem+json"
        assert headers["connection"] == "close"
        assert headers["x-content-type-options"] == "nosniff"
        problem = Problem.model_validate_json(await self.reader.read())
        assert (problem.status, problem.request_id) == (status, headers["x-request-id"])
        return problem

    async def _head(self) -> tuple[int, dict[str, str]]:
        line, *fields = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(field.lower().split(": ", 1) for field in fields if field)
        return int(line.split()[1]), headers


Client = Callable[[Connection], Awaitable[None]]
RunClient = Callable[[Client], None]


class ShortProtocol(HttpProtocol):
    """The protocol with time limits that a test can wait for."""

    head_timeout_s = 1.0
    read_timeout_s = 0.6
    service: Service

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.pipeline:
            self.service.queued.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.service.lost.set()


def client_runner(new_loop: Callable[[], AbstractEventLoop]) -> RunClient:
    """Make a function that runs a client with a new service, on a loop of some kind."""

    async def serve(client: Client) -> None:
        service = Service()
        config = Config(
            RequestTracking(service, service.metrics), lifespan="off", log_config=None, ws="none"
        )
        state = ServerState()
        service.connections = cast("set[HttpProtocol]", state.connections)

        class Protocol(ShortProtocol):
            pass

        Protocol.service = service
        server = await asyncio.get_running_loop().create_server(
            lambda: Protocol(config, state, {}), "127.0.0.1", 0
        )
        address = server.sockets[0].getsockname()
        async with server, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(*address)
            try:
                await client(Connection(service, reader, writer))
            finally:
                writer.close()
                for server_side in service.connections:
                    server_side.transport.abort()
                await asyncio.sleep(0)

    def run(client: Client) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve(client))

    return run
