"""A service that receives bodies in place, and a client of it, on any event loop."""

import asyncio
import weakref
from asyncio import AbstractEventLoop, StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from app.api.upload.direct import fill_body_of
from app.server.http_protocol import DirectBodyProtocol

BODY = np.random.default_rng(5).bytes(3 << 20)
OTHER = np.random.default_rng(6).bytes(len(BODY))
LIVENESS = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
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
        counted: Bytes that have come in place.
        buffers: Weak references to the memory that bodies were received into.
    """

    left: asyncio.Event = field(default_factory=asyncio.Event)
    counted: int = 0
    buffers: list[weakref.ref[np.ndarray]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200 if the body is as expected."""
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
        buffer = np.empty(len(BODY), dtype=np.uint8)
        self.buffers.append(weakref.ref(buffer))
        content = buffer.data
        content[: len(first)] = first
        await fill(content[len(first) :], self._count)
        return content

    def buffers_alive(self) -> int:
        """Count the bodies that are still in memory."""
        return sum(buffer() is not None for buffer in self.buffers)

    def _count(self, size: int) -> None:
        self.counted += size


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
        return int((await self.reader.readuntil(b"\r\n\r\n")).split()[1])


Client = Callable[[Connection], Awaitable[None]]
RunClient = Callable[[Client], None]


def client_runner(new_loop: Callable[[], AbstractEventLoop]) -> RunClient:
    """Make a function that runs a client with a new service, on a loop of some kind."""

    async def serve(client: Client) -> None:
        service = Service()
        config = Config(service, lifespan="off", log_config=None)

        server = await asyncio.get_running_loop().create_server(
            lambda: DirectBodyProtocol(config, ServerState(), {}), "127.0.0.1", 0
        )
        address = server.sockets[0].getsockname()
        async with server, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(*address)
            try:
                await client(Connection(service, reader, writer))
            finally:
                writer.close()

    def run(client: Client) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve(client))

    return run
