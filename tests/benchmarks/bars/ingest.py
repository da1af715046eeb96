"""S3: how fast an upload gets to whoever is to read it.

All servers get a raw file whose header declares one byte more than there is, so reading it fails as
soon as the handler has all of it, before anything is computed. Timed from the first byte sent to
the last of the refusal.
"""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import numpy as np

from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.loads import send_one
from tests.benchmarks.scans import PHANTOM, pack
from tests.benchmarks.servers import BARE, BENTOML, LITSERVE, LOCKED, OURS, Server, absent, serving

SHAPE: Final = (256, 256, 512)
"""Of int16: 64 MiB."""

SPEEDUP: Final = 4.0
LIMITS: Final = {
    LOCKED: Limit(SPEEDUP),
    LITSERVE: Limit(SPEEDUP),
    BENTOML: None,
    BARE: Limit(None, "cost"),
}
"""The bar is about forms; BentoML gets the same raw body as we do."""

NOTES: Final = {
    BENTOML: "raw, too; it writes a file of it for its handler to read",
    BARE: "no HTTP: what the client and the kernel take",
}


def s3_ingest(run: Run) -> Iterator[Row]:
    """64 MiB raw, against forms, a raw body to BentoML, and a socket that is only read."""
    shape = (64, 64, 128) if run.fast else SHAPE
    content = pack(np.zeros(shape, dtype=np.int16, order="F"), np.eye(4), level=0)[:-1]
    said = f"expected {len(content) + 1:,} bytes".encode()
    what = f"{np.prod(shape) * 2 / 2**20:.0f} MiB received and refused"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(kind, PHANTOM))
            for kind in (OURS, *LIMITS)
            if kind.installed
        ]
        spent: dict[str, list[float]] = {server.kind.name: [] for server in servers}
        for turn in range(run.rounds + 1):
            for server in servers:
                milliseconds = _upload(server, content, said)
                if turn:
                    spent[server.kind.name].append(milliseconds)
    ours = statistics.median(spent[OURS.name])
    for kind, limit in LIMITS.items():
        if not kind.installed:
            yield absent(kind, what, limit)
            continue
        theirs = statistics.median(spent[kind.name])
        yield Row(what, ours, "ms", kind.name, theirs, limit, NOTES.get(kind, ""), run.rounds)


def _upload(server: Server, content: bytes, said: bytes) -> float:
    reply = send_one(server.port, server.message("short", content))
    if server.kind is not BARE and (not 400 <= reply.status < 500 or said not in reply.body):
        raise DisagreementError(
            f"{server.kind.name}: expected a refusal that says {said!r}, "
            f"got {reply.status} {reply.body[:200]!r}"
        )
    return 1e3 * reply.seconds
