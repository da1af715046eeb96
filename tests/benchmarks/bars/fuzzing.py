"""R2: damaged scans and archives by the ten thousand, sent to a real service."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.linux import resident_bytes
from tests.benchmarks.loads import LOST, Load, Message, Reply, Stream, send
from tests.benchmarks.mutations import mutate, sound_archives, sound_scans
from tests.benchmarks.scans import PHANTOM
from tests.benchmarks.servers import OURS, Server, serving

SCANS: Final = 100_000
ARCHIVES: Final = 30_000
AT_ONCE: Final = 1000
"""Files that are in memory at the same time."""

CLIENTS: Final = 4
SLOW_S: Final = 10.0
EXPECTED: Final = frozenset({503, 504, 507})
"""What a service may answer above 500: it is full or stops, it is late, it does not fit."""

NONE: Final = Limit(0, "figure")
GROWTH: Final = Limit(1.05, "figure")


def r2_fuzzing(run: Run) -> Iterator[Row]:
    """Damaged scans and archives: no unexpected error, no hang, no growth."""
    with serving(OURS, PHANTOM, LOG_LEVEL="error", MAX_BODY_BYTES=str(1 << 20)) as server:
        for what, files, target, count in (
            ("scans", sound_scans(), "/v1/landmarks?timeout_s=5", SCANS),
            ("archives", sound_archives(), "/v1/votes?timeout_s=5", ARCHIVES),
        ):
            yield from _fuzz(server, what, files, target, 300 if run.fast else count)


def _fuzz(
    server: Server, what: str, files: Sequence[bytes], target: str, count: int
) -> Iterator[Row]:
    statuses: Counter[int] = Counter()
    odd: list[str] = []
    slowest = 0.0
    before = 0
    for first in range(0, count, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, count))
        mutants = [mutate(files, seed) for seed in seeds]
        messages = tuple(
            Message(str(mutant.seed), target, mutant.content or b"\0", keep=True)
            for mutant in mutants
        )
        for reply in send(Load(server.port, (Stream(messages, CLIENTS, len(messages)),))):
            statuses[reply.status] += 1
            slowest = max(slowest, reply.seconds)
            if not _as_promised(reply):
                odd.append(f"seed {reply.name}: {reply.status} {reply.body[:100]!r}")
        before = before or resident_bytes(server.process)
    note = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
    yield Row(f"{count} damaged {what} answered otherwise", len(odd), "", limit=NONE, note=note)
    for one in odd[:20]:
        yield Row(one, 1.0, "", limit=NONE)
    yield Row(f"slowest answer to damaged {what}", slowest, "s", limit=Limit(SLOW_S, "figure"))
    growth = resident_bytes(server.process) / before
    limit = Limit(None if count < AT_ONCE else GROWTH.value, "figure")
    yield Row(f"memory after {what} over that after {AT_ONCE} of them", growth, "x", limit=limit)


def _as_promised(reply: Reply) -> bool:
    """Say whether an answer is one that clients are promised, with numbers that are numbers."""
    if reply.status == LOST or (reply.status >= 500 and reply.status not in EXPECTED):
        return False
    try:
        answer = json.loads(reply.body, parse_constant=_refuse)
    except ValueError:
        return False
    return reply.status == 200 or answer.get("status") == reply.status


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, got {constant}")
