"""No server at all: bytes are read off a socket into one buffer, and forgotten.

``python -m tests.benchmarks.rivals.bare_socket FOLDER PORT`` answers 200 to everything.
"""

import re
import socket
import sys
from contextlib import suppress
from typing import Final

OK: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def answer(connection: socket.socket, buffer: bytearray) -> None:
    """Read one request, and say ok."""
    head = piece = connection.recv(65_536)
    while piece and b"\r\n\r\n" not in head:
        piece = connection.recv(65_536)
        head += piece
    head, _, body = head.partition(b"\r\n\r\n")
    length = LENGTH.search(head)
    left = (int(length[1]) if length else 0) - len(body)
    while left > 0 and (count := connection.recv_into(buffer)):
        left -= count
    if left <= 0:
        connection.sendall(OK)


def main() -> None:
    """Answer for ever."""
    buffer = bytearray(1 << 20)
    with socket.create_server(("127.0.0.1", int(sys.argv[2]))) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                answer(connection, buffer)


if __name__ == "__main__":
    main()
