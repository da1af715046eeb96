"""The bytes of a request, and how its client behaves -> what came back, on a connection of its own.

Written on sockets' streams, because no client library sends half of a request or reads no answer.
"""

import asyncio
import contextlib
import json
import socket
import struct
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tests.benchmarks.loads import HANG_S, LEFT, LOST

CLOSED: Final = -2
"""Status of a request whose connection the service closed without any answer."""

REFUSED: Final = -3
"""Status of a request that could not be sent: nobody listens."""

HUNG: Final = -4
"""Status of a request that got no answer in a very long time."""

CONNECT_S: Final = 10.0
"""For the system to connect; where nobody answers it would try for minutes."""

RESET: Final = struct.pack("ii", 1, 0)
RECEIVE_BYTES: Final = 4096
EVENT_STREAM: Final = "text/event-stream"

Then = Literal["read", "close half", "leave", "reset", "do not read"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a client does.

    Attributes:
        content: The bytes of the request.
        share: Of the bytes that are sent.
        pieces: In which they are sent,
        pause_s: with a pause after each.
        then: What the client does when all is sent. ``close half`` is followed by reading.
        wait_s: Before it leaves, or without reading.
        known: Name of the scan, if its landmarks are known: a good answer must have them.
    """

    content: bytes
    share: float = 1.0
    pieces: int = 1
    pause_s: float = 0.0
    then: Then = "read"
    wait_s: float = 0.0
    known: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        status: Of HTTP, or LEFT, LOST, CLOSED, REFUSED or HUNG.
        headers: Names in lower case.
        body: In a stream of events, all of them.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def settle(self) -> tuple[int, Any]:
        """Read status and JSON of an answer; in a stream of events, of the last one."""
        if self.status <= 0:
            return self.status, None
        if self.headers.get("content-type", "").partition(";")[0] != EVENT_STREAM:
            try:
                return self.status, json.loads(self.body)
            except ValueError:
                return self.status, None
        event, _, data = self.body.strip().rpartition(b"\n\n")[2].partition(b"\n")
        try:
            found = json.loads(data.removeprefix(b"data: "))
        except ValueError:
            return LOST, None
        return (found["status"] if event == b"event: problem" else self.status), found


def post(
    target: str,
    body: bytes,
    request_id: str,
    headers: Mapping[str, str] | None = None,
    *,
    chunked: bool = False,
    trailers: bytes = b"",
) -> bytes:
    """Write a request; a GET if there is no body.

    Args:
        target: Path and query.
        body: Of a POST.
        request_id: Sent along; empty: none is.
        headers: Besides those that every request has; one given replaces that one.
        chunked: Whether the body comes in chunks, whose length nobody knows before,
        trailers: and these behind it, each with its line's end.
    """
    fields = {"Host": "localhost", "Accept": "application/json"}
    if request_id:
        fields["X-Request-ID"] = request_id
    if chunked:
        fields["Transfer-Encoding"] = "chunked"
        size = max(1, len(body) // 3)
        parts = [body[first : first + size] for first in range(0, len(body), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        body += b"0\r\n" + trailers + b"\r\n"
    elif body:
        fields["Content-Length"] = str(len(body))
    if body:
        fields["Content-Type"] = "application/octet-stream"
    lines = [f"{'POST' if body else 'GET'} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in {**fields, **(headers or {})}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def make(port: int, address: str, attempt: Attempt, hurry: asyncio.Event) -> Answer:
    """Make an attempt.

    Args:
        port: Of the service.
        address: Of the client, on loopback: services tell clients apart by it.
        attempt: What to do.
        hurry: Ends the waits of clients that read nothing.

    Returns:
        What came back.
    """
    connection = socket.socket()
    connection.setblocking(False)
    if attempt.then == "do not read":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    try:
        connection.bind((address, 0))
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except OSError:  # Of which TimeoutError is one.
        connection.close()
        return Answer(REFUSED)
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        async with asyncio.timeout(HANG_S):
            return await _exchange(reader, writer, attempt, hurry)
    except TimeoutError:
        return Answer(HUNG)
    finally:
        if attempt.then == "reset":
            with contextlib.suppress(OSError):  # The service may have closed it.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()


async def _exchange(
    reader: StreamReader, writer: StreamWriter, attempt: Attempt, hurry: asyncio.Event
) -> Answer:
    # An answer may come before all is sent, and sending may fail because of it.
    sending = asyncio.create_task(_send(writer, attempt))
    try:
        if attempt.then in {"leave", "reset"}:
            await sending
            await asyncio.sleep(attempt.wait_s)
            return Answer(LEFT)
        if attempt.then == "do not read":
            await sending
            try:
                async with asyncio.timeout(attempt.wait_s):
                    await hurry.wait()
            except TimeoutError:
                return await _read(reader)
            return Answer(LEFT)
        return await _read(reader)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _send(writer: StreamWriter, attempt: Attempt) -> None:
    content = memoryview(attempt.content)[: int(attempt.share * len(attempt.content))]
    size = max(1, -(-len(content) // attempt.pieces))
    try:
        for first in range(0, len(content), size):
            writer.write(content[first : first + size])
            await writer.drain()
            await asyncio.sleep(attempt.pause_s)
        if attempt.then == "close half":
            writer.write_eof()
    except OSError:
        return


async def _read(reader: StreamReader) -> Answer:
    head = b""
    try:
        status = 100
        while status == 100:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").splitlines()
            status = int(first.split()[1])
        parts = (line.partition(":") for line in lines if line)
        headers = {name.lower(): value.strip() for name, _, value in parts}
        return Answer(status, headers, await _read_body(reader, headers))
    except IncompleteReadError as error:
        return Answer(LOST if head or error.partial else CLOSED)
    except OSError:
        return Answer(LOST)


async def _read_body(reader: StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return body
