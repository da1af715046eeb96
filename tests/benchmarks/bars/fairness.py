"""S11: how long a small scan of one client waits beside the many huge ones of another."""

import gzip
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from app.phantom import make_phantom
from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.loads import Load, Message, Stream, of_kind, percentile, send
from tests.benchmarks.scans import HUGE, PHANTOM, enlarge, pack, small_scans
from tests.benchmarks.servers import OURS, Server, answers, check_same, serving

HUGE_COUNT: Final = 60
IDLE_COUNT: Final = 30
OTHER: Final = "127.0.0.2"
"""Address of the client with small scans."""

LEVEL: Final = 1
"""Of gzip."""

DESCRIPTION: Final = slice(148, 228)
"""Where the header of NIfTI-1 has ``descrip``."""

LIMIT: Final = Limit(5.0, "cost")
HUGE_S: Final = 45
"""Nobody waits longer for a huge scan, so that the bar ends."""

STATUSES: Final = {200, 429, 504}
"""Of huge scans: answered, beyond one client's share of the places, too late."""


def s11_fairness(run: Run) -> Iterator[Row]:
    """All huge scans are sent at once; small ones, one after the other, until those are done."""
    count, shape = (6, (120, 84, 100)) if run.fast else (HUGE_COUNT, HUGE)
    contents = small_scans(2 if run.fast else 8)
    with serving(OURS, PHANTOM) as server:
        expected = answers(server, contents)
        small = tuple(
            server.message(f"small {number}", content, keep=True)
            for number, content in enumerate(contents)
        )
        idle = send(Load(server.port, (Stream(small, count=3 if run.fast else IDLE_COUNT),)))
        huge = Stream(_huge_messages(server, count, shape), clients=count, count=count)
        replies = send(Load(server.port, (huge, Stream(small, address=OTHER))))
    answered = of_kind(replies, "huge")
    beside = [reply for reply in replies if reply not in answered]
    for reply in (*idle, *beside):
        if reply.status != 200:
            raise DisagreementError(f"expected status 200, got {reply.status}")
        check_same(reply.body, expected[int(reply.name.split()[1])], "alone")
    statuses = Counter(reply.status for reply in answered)
    if statuses.keys() - STATUSES:
        raise DisagreementError(f"expected statuses of {STATUSES}, got {statuses.keys()}")
    size = "x".join(map(str, shape))
    what = f"p95 of a one-tile scan beside {count} of {size} of another client"
    huge_statuses = ", ".join(f"{n} x {status}" for status, n in sorted(statuses.items()))
    note = f"phantom model, {len(beside)} small scans, slowest {percentile(beside, 100):.0f} ms; "
    note += f"huge ones: {huge_statuses}"
    yield Row(what, percentile(beside, 95), "ms", "idle median", percentile(idle, 50), LIMIT, note)


def _huge_messages(server: Server, count: int, shape: tuple[int, int, int]) -> tuple[Message, ...]:
    """Make messages whose scans differ in their headers only, so that no answer is shared."""
    content = pack(enlarge(make_phantom(0).volume.voxels, shape), np.eye(4), level=0)
    start = len(content) - 2 * math.prod(shape)
    voxels = gzip.compress(content[start:], LEVEL, mtime=0)
    messages = []
    for number in range(count):
        header = bytearray(content[:start])
        header[DESCRIPTION] = b"%080d" % number
        members = gzip.compress(header, mtime=0)
        messages.append(
            replace(server.message("huge", members, query=f"?timeout_s={HUGE_S}"), rest=voxels)
        )
    return tuple(messages)
