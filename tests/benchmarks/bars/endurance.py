"""S7: a thousand requests of all kinds."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from app.compute.heap_trim import DELAY_S
from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.linux import resident_bytes
from tests.benchmarks.loads import LEFT, LOST, Load, Message, Reply, Stream, send, send_one
from tests.benchmarks.scans import PHANTOM, small_scans
from tests.benchmarks.servers import OURS, Server, answers, check_same, serving

REQUESTS: Final = 1000
WARM: Final = 200
CLIENTS: Final = 8
BODY_LIMIT: Final = 4 << 20
SLOPE_KIB: Final = 4.0
"""A leak of the smallest scan, or of its grid, would be 30 times this per request."""

STATUSES: Final = {
    "good": 200,
    "left": LEFT,
    "garbage": 400,
    "truncated": 400,
    "unknown": 404,
    "late": 504,
    "oversized": 413,
}
"""What each kind of request must get."""

ROUNDS: Final = 4
"""Of as many more requests: what a service holds at rest varies by 10 MiB."""

RIGHT: Final = Limit(0, "figure")


def s7_endurance(run: Run) -> Iterator[Row]:
    """Good, bad, cancelled, late and oversized ones in random order, from 8 clients."""
    count, warm = (40, 10) if run.fast else (REQUESTS, WARM)
    contents = small_scans(2 if run.fast else 8)
    settings = {"MAX_BODY_BYTES": str(BODY_LIMIT), "LOG_LEVEL": "error"}
    with serving(OURS, PHANTOM, **settings) as server:
        expected = answers(server, contents)
        messages = _mix(server, contents, count)
        load = Load(server.port, (Stream(messages, CLIENTS, count),), watch=server.process)
        replies = send(load)
        rested = _at_rest(server, fast=run.fast)
        more = sum(len(send(load)) for _ in range(ROUNDS))
        growth = (_at_rest(server, fast=run.fast) - rested) / 1024 / more
        metrics = send_one(server.port, Message("metrics", "/metrics")).body.decode()
        alive = answers(server, contents[:1])
    check_same(alive[0], expected[0], "before")
    good = [reply for reply in replies if reply.name.startswith("good")]
    wrong = sum(not _right(reply, expected) for reply in good)
    yield Row(f"wrong answers to {len(good)} good requests", wrong, "", limit=RIGHT)
    others = [reply for reply in replies if not reply.name.startswith("good")]
    odd = [reply for reply in others if reply.status != STATUSES[reply.name]]
    note = "; ".join(sorted({f"{reply.name}: {reply.status}" for reply in odd}))
    what = f"wrong answers to {len(others)} bad, cancelled, late or oversized ones"
    yield Row(what, len(odd), "", limit=RIGHT, note=note)
    lost = count - sum(reply.status != LOST for reply in replies)
    yield Row("requests that hang or lose their connection", lost, "", limit=RIGHT)
    in_flight = re.search(r"^landmarkd_requests_in_flight (\S+)", metrics, re.MULTILINE)
    left = float(in_flight[1]) if in_flight else float("nan")
    yield Row("requests in flight afterwards", left, "", limit=RIGHT)
    slope = _slope_kib(replies[warm:])
    note = f"{replies[warm].memory >> 20} to {replies[-1].memory >> 20} MiB"
    what = f"memory that grows with every request after the first {warm}"
    limit = Limit(None if run.fast else SLOPE_KIB, "figure")
    yield Row(what, slope, "KiB", limit=limit, note=note)
    what = f"memory at rest that grows with every request from {count} to {(1 + ROUNDS) * count}"
    yield Row(what, growth, "KiB", limit=limit, note=f"{rested >> 20} MiB at first")


def _at_rest(server: Server, *, fast: bool) -> int:
    """Say what the service holds when it has tidied up after its work; a fast run does not wait."""
    if not fast:
        time.sleep(DELAY_S + 2)
    return resident_bytes(server.process)


def _mix(server: Server, contents: Sequence[bytes], count: int) -> tuple[Message, ...]:
    """Make as many messages as asked for, in an order that is random and always the same."""
    random = np.random.default_rng(7)
    zipped = contents[0]
    bad = (
        server.message("garbage", random.bytes(40_000)),
        server.message("truncated", zipped[: len(zipped) // 2]),
        server.message("unknown", zipped, query="?model=nobody"),
        server.message("oversized", bytes(BODY_LIMIT + 1)),
    )
    mix = []
    for number in range(count):
        scan = number // 4 % len(contents)
        good = server.message(f"good {scan}", contents[scan], keep=True)
        left = replace(good, name="left", leave="waiting" if number % 3 else "uploading")
        late = server.message("late", contents[scan], query="?timeout_s=0.001")
        kinds = (good, good, bad[number // 4 % 4], left if number // 4 % 2 else late)
        mix.append(kinds[number % 4])
    return tuple(mix[place] for place in random.permutation(count))


def _right(reply: Reply, expected: Sequence[bytes]) -> bool:
    """Say whether a good request got its own landmarks."""
    if reply.status != STATUSES["good"]:
        return False
    try:
        check_same(reply.body, expected[int(reply.name.split()[1])], "alone")
    except DisagreementError:
        return False
    return True


def _slope_kib(replies: Sequence[Reply]) -> float:
    """Fit a line to the memory after every reply; gives KiB per request."""
    memory = np.array([reply.memory for reply in replies]) / 1024
    return float(np.polyfit(np.arange(len(memory)), memory, 1)[0])
