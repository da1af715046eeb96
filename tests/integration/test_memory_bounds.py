"""The service as a process whose memory, or share of it, is short."""

import gzip
import re
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from app.io.schemas import Problem
from tests.support.services import RAW, FreshService, ServiceProcess, toy_models, toy_scan

URL = "/v1/landmarks"
SPARE_BYTES = 64 << 20
"""Of address space: enough for a toy scan, too little for a large one."""

LARGE = (480, 481, 482)
"""A gigabyte as float32 zeros, which gzip makes 400 KB of."""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return toy_models(tmp_path)


def large_scan() -> bytes:
    header = bytearray(toy_scan()[:352])
    struct.pack_into("<3h", header, 42, *LARGE)
    i, j, k = LARGE
    return gzip.compress(bytes(header), 1) + gzip.compress(bytes(4 * i * j), 1) * k


def post(service: ServiceProcess, content: bytes) -> httpx.Response:
    return httpx.post(service.url + URL, content=content, headers=RAW, timeout=60)


@contextmanager
def limited_memory(service: ServiceProcess) -> Iterator[None]:
    """Leave the service little more address space than it has now, until the block ends."""
    import resource  # noqa: PLC0415 - not there on every platform

    status = Path(f"/proc/{service.pid}/status").read_text(encoding="ascii")
    used = re.search(r"^VmSize:\s+(\d+) kB", status, re.MULTILINE)
    assert used is not None
    hard = resource.prlimit(service.pid, resource.RLIMIT_AS)[1]
    resource.prlimit(service.pid, resource.RLIMIT_AS, ((int(used[1]) << 10) + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.prlimit(service.pid, resource.RLIMIT_AS, (hard, hard))


def head(length: int) -> bytes:
    return f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def test_bytes_that_are_announced_and_never_sent_refuse_nobody(models: Path) -> None:
    service = FreshService(models, MEMORY="4GiB", BODY_TIMEOUT_S="60")
    try:
        with ExitStack() as stack:
            for _ in range(4):
                address = ("127.0.0.1", service.port)
                idle = stack.enter_context(socket.create_connection(address, timeout=60))
                idle.sendall(head(512 << 20))
            # In flight: the first metrics that say so.
            while "requests_in_flight 4.0" not in httpx.get(service.url + "/metrics").text:
                pass
            assert post(service, toy_scan()).status_code == 200
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(head(900 << 20))
                assert connection.recv(65_536).startswith(b"HTTP/1.1 413")
    finally:
        service.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by Linux's prlimit")
def test_request_for_which_memory_runs_out_gets_507_and_harms_no_other(models: Path) -> None:
    service = FreshService(models, MEMORY="64GiB")
    try:
        assert post(service, toy_scan()).status_code == 200  # All threads have started.
        with limited_memory(service):
            decoding = post(service, large_scan())
            with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
                connection.sendall(head(8 * SPARE_BYTES))
                receiving = connection.recv(65_536)
            assert post(service, toy_scan()).status_code == 200
        assert decoding.status_code == 507
        problem = Problem.model_validate_json(decoding.content)
        assert problem.code == "does-not-fit"
        assert receiving.startswith(b"HTTP/1.1 507")
        assert httpx.get(service.url + "/readyz", timeout=60).status_code == 200
        assert post(service, toy_scan((25, 18, 24))).status_code == 200
    finally:
        service.kill()
