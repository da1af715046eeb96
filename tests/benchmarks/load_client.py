"""a Load on standard input -> Replies on standard output: the clients, a thread each."""

import itertools
import pickle
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException

from tests.benchmarks.linux import resident_bytes
from tests.benchmarks.loads import HANG_S, LEFT, LOST, Load, Message, Reply, Stream


class Clients:
    """All clients of a load."""

    def __init__(self, load: Load) -> None:
        """Args: what to send."""
        self._load = load
        self._replies: list[Reply] = []
        self._start = time.perf_counter()

    def run(self) -> list[Reply]:
        """Send everything, and wait for all answers."""
        counted = [self._start_clients(stream) for stream in self._load.streams if stream.count]
        over = threading.Event()
        endless = [
            self._start_clients(stream, over)
            for stream in self._load.streams
            if stream.count is None
        ]
        for thread in itertools.chain(*counted):
            thread.join()
        if counted:
            over.set()
        for thread in itertools.chain(*endless):
            thread.join()
        return self._replies

    def _start_clients(
        self, stream: Stream, over: threading.Event | None = None
    ) -> list[threading.Thread]:
        numbers = itertools.count()  # Its next() is one step, which threads cannot tear apart.
        threads = [
            threading.Thread(target=self._send_all, args=(stream, numbers, over))
            for _ in range(stream.clients)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _send_all(
        self, stream: Stream, numbers: "itertools.count[int]", over: threading.Event | None
    ) -> None:
        connection = HTTPConnection(
            "127.0.0.1", self._load.port, HANG_S, source_address=(stream.address, 0)
        )
        while time.perf_counter() - self._start < self._load.seconds:
            number = next(numbers)
            if stream.count is not None and number >= stream.count:
                break
            if over is not None and over.is_set():
                break
            message = stream.messages[number % len(stream.messages)]
            self._replies.append(self._send(connection, message))
        connection.close()

    def _send(self, connection: HTTPConnection, message: Message) -> Reply:
        start = time.perf_counter()
        try:
            if connection.sock is None:
                connection.connect()
                start = time.perf_counter()
            status, body = exchange(connection, message)
        except (OSError, HTTPException):
            connection.close()
            status, body = LOST, b""
        seconds = time.perf_counter() - start
        memory = resident_bytes(self._load.watch) if self._load.watch else 0
        kept = body if message.keep else b""
        return Reply(message.name, status, start - self._start, seconds, memory, kept)


def exchange(connection: HTTPConnection, message: Message) -> tuple[int, bytes]:
    """Send a message, and wait for its answer unless the message says to leave."""
    connection.putrequest("POST" if message.body else "GET", message.target)
    for name, value in (message.headers or {}).items():
        connection.putheader(name, value)
    if message.body:
        connection.putheader("Content-Length", str(len(message.body) + len(message.rest)))
    connection.endheaders()
    if message.leave == "uploading":
        connection.send(message.body[: len(message.body) // 2])
    elif message.body:
        connection.send(message.body)
        connection.send(message.rest)
    if message.leave:
        connection.close()
        return LEFT, b""
    response = connection.getresponse()
    return response.status, response.read()


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(Clients(pickle.load(sys.stdin.buffer)).run()))  # noqa: S301
