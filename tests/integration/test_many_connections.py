"""One client that opens connections again and again, and sends nothing."""

import socket
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.support.services import ServiceProcess, ended, toy_models, toy_scan

FEW_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 160))"


def test_idle_connections_take_no_place_of_others(tmp_path: Path) -> None:
    """At the soft limit or the hard one, all others were reset, as were probes, without a word."""
    scan = toy_scan()
    head = f"POST /v1/landmarks HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(scan)}\r\n\r\n"
    with ended(ServiceProcess(toy_models(tmp_path), FEW_FILES)) as service, ExitStack() as opened:

        def connect() -> socket.socket:
            address = "127.0.0.1", service.port
            return opened.enter_context(socket.create_connection(address, timeout=60))

        upload = connect()
        upload.sendall(head.encode() + scan[:100])
        for _ in range(10):
            for _ in range(50):
                connect()
            assert httpx.get(f"{service.url}/livez", timeout=60).status_code == 200
        upload.sendall(scan[100:])
        assert upload.recv(12) == b"HTTP/1.1 200"
