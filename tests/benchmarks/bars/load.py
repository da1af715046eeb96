"""The load table: small and huge scans from 1 to 32 clients, ours beside the rivals."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tests.benchmarks.harness import DisagreementError, Row, Run
from tests.benchmarks.loads import Load, Message, Stream, of_kind, percentile, send
from tests.benchmarks.scans import PHANTOM, large_scans, small_scans
from tests.benchmarks.servers import (
    OURS,
    RIVALS,
    Kind,
    Server,
    absent,
    answers,
    check_same,
    serving,
)

CLIENTS: Final = (1, 2, 4, 8, 32)
SECONDS: Final = 15.0
HUGE: Final = (210, 204, 208)
"""At 1 mm: 27 tiles of the phantom model, so that enough of them end in the time."""

ROUND: Final = 40
"""Messages after which the mix begins again; a tenth of them are huge."""

PERCENTS: Final = (50, 95, 99)
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Scans:
    """What is sent: scans of one tile, and huge ones."""

    small: Sequence[bytes]
    huge: Sequence[bytes]


def load(run: Run) -> Iterator[Row]:
    """Times of small scans, of huge ones, and per request, in a mix of 90 % and 10 %."""
    shape = (84, 80, 82) if run.fast else HUGE
    scans = Scans(small_scans(3 if run.fast else ROUND), large_scans(1 if run.fast else 4, shape))
    clients = CLIENTS[:2] if run.fast else CLIENTS
    with serving(OURS, PHANTOM) as server:
        expected = _check_set(server, scans)
        ours = {count: _measure(server, scans, count, run) for count in clients}
    for kind in RIVALS:
        if not kind.installed:
            yield absent(kind, "load table")
            continue
        theirs = _measure_rival(kind, scans, expected, clients, run)
        for count in clients:
            for name, value in ours[count].items():
                what = f"{count} clients, {name}"
                yield Row(what, value, "ms", kind.name, theirs[count].get(name))


def _measure_rival(
    kind: Kind, scans: Scans, expected: Sequence[bytes], clients: Sequence[int], run: Run
) -> dict[int, Figures]:
    with serving(kind, PHANTOM) as server:
        for mine, yours in zip(expected, _check_set(server, scans), strict=True):
            check_same(mine, yours, kind.name)
        return {count: _measure(server, scans, count, run) for count in clients}


def _check_set(server: Server, scans: Scans) -> list[bytes]:
    return answers(server, [*scans.small[:3], scans.huge[0]])


def _measure(server: Server, scans: Scans, clients: int, run: Run) -> Figures:
    stream = Stream(_mix(server, scans), clients)
    replies = send(Load(server.port, (stream,), 0.3 if run.fast else SECONDS))
    wrong = {reply.status for reply in replies} - {200}
    if wrong:
        raise DisagreementError(f"{server.kind.name}: expected status 200, got {wrong}")
    small, huge = of_kind(replies, "small"), of_kind(replies, "huge")
    figures = {f"p{percent} of small scans": percentile(small, percent) for percent in PERCENTS}
    if huge:
        figures["p50 of huge scans"] = percentile(huge, 50)
    span = max(reply.start_s + reply.seconds for reply in replies)
    return figures | {"time per request": 1e3 * span / len(replies)}


def _mix(server: Server, scans: Scans) -> tuple[Message, ...]:
    """Put a huge scan somewhere among every nine small ones."""
    random = np.random.default_rng(9)
    messages: list[Message] = []
    for number in range(0, ROUND, 10):
        ten = [
            server.message("small", scans.small[(number + place) % len(scans.small)])
            for place in range(9)
        ]
        huge = server.message("huge", scans.huge[number // 10 % len(scans.huge)])
        ten.insert(int(random.integers(10)), huge)
        messages += ten
    return tuple(messages)
