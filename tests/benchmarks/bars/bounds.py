"""S12: what clients that send little, or nothing, can take from the others."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from select import select
from typing import Final

import numpy as np

from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.linux import forget_peak, resident_bytes
from tests.benchmarks.loads import Load, Stream, send
from tests.benchmarks.scans import PHANTOM, pack, small_scans
from tests.benchmarks.servers import OURS, Server, answers, check_same, serving

SCANS: Final = 24
GIANT_MM: Final = 600.0
"""Edge of a voxel: eight of them span hundreds of millions of the model's."""

WIDEST_MM: Final = 95.0
"""As wide as eight voxels may be: they span a million of the model's."""

CLAIMS: Final = 4
CLAIMED: Final = 512 << 20
HEAD_BYTES: Final = 16 << 20
"""Of an endless head, unless it is refused before."""

MEMORY: Final = Limit(1000, "figure")
NONE: Final = Limit(0, "figure")


def s12_bounds(run: Run) -> Iterator[Row]:
    """Scans of eight voxels, an endless head, and bodies that never come."""
    count = 4 if run.fast else SCANS
    (content,) = small_scans(1)
    with serving(OURS, PHANTOM) as server:
        (expected,) = answers(server, [content])
        for edge_mm, status in ((GIANT_MM, 422), (WIDEST_MM, 200)):
            scans = [_wide_scan(edge_mm, number) for number in range(count)]
            added = _memory_of(server, scans, status)
            what = f"memory that {count} scans of {len(scans[0])} bytes at once add"
            note = f"voxels {edge_mm:g} mm wide: status {status}"
            yield Row(what, added / 1e6, "MB", limit=MEMORY, note=note)
        refused, sent = _send_endless_head(server)
        note = f"refused after {sent >> 10} KiB"
        yield Row("endless heads that are read on", int(not refused), "", limit=NONE, note=note)
        with ExitStack() as stack:
            for _ in range(CLAIMS):
                stack.enter_context(_announce(server))
            message = server.message("small", content, keep=True)
            replies = send(Load(server.port, (Stream((message,), count=CLAIMS),)))
    good = [reply for reply in replies if reply.status == 200]
    for reply in good:
        check_same(reply.body, expected, "before")
    what = f"requests refused while {CLAIMS} others announce {CLAIMED >> 20} MiB and send nothing"
    yield Row(what, len(replies) - len(good), "", limit=NONE)


def _wide_scan(edge_mm: float, number: int) -> bytes:
    """Make a scan of eight voxels; its number makes it differ from others."""
    voxels = np.arange(8, dtype=np.uint8).reshape(2, 2, 2) + np.uint8(number)
    return pack(voxels, np.diag([edge_mm] * 3 + [1.0]), level=0)


def _memory_of(server: Server, scans: Sequence[bytes], status: int) -> int:
    """Send scans at once; return by how many bytes the service grows at most."""
    before = resident_bytes(server.process)
    forget_peak(server.process)
    query = "?timeout_s=600"
    messages = tuple(server.message("wide", scan, query=query) for scan in scans)
    replies = send(Load(server.port, (Stream(messages, len(messages), len(messages)),)))
    wrong = {reply.status for reply in replies} - {status}
    if wrong:
        raise DisagreementError(f"expected status {status}, got {wrong}")
    return resident_bytes(server.process, peak=True) - before


def _send_endless_head(server: Server) -> tuple[bool, int]:
    """Send a head until it is refused; return whether it is, and bytes sent."""
    field = b"X-Field: " + b"x" * 1000 + b"\r\n"
    sent, received = 0, b""
    with _connect(server) as connection:
        try:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n")
            while sent < HEAD_BYTES and not select([connection], [], [], 0)[0]:
                connection.sendall(field)
                sent += len(field)
            received = connection.recv(1 << 16)
        except OSError:  # Reset, as more came than was read.
            pass
    return received.startswith(b"HTTP/1.1 431"), sent


def _announce(server: Server) -> socket.socket:
    """Announce a body of which nothing is sent."""
    connection = _connect(server)
    target = server.message("", b"").target.encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % (target, CLAIMED))
    return connection


def _connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)
