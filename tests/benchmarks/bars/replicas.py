"""S8: two replicas on Ray Serve against one, one thread each, clients apart."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from app.detector import Detector
from app.loading import load_checked
from tests.benchmarks.bars.throughput import Work, check_all, serve_all
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.rivals import serial_loop
from tests.benchmarks.scans import PHANTOM, SKULL, skulls, small_scans
from tests.benchmarks.servers import (
    ONE_REPLICA,
    TWO_REPLICAS,
    Kind,
    absent,
    replicas_of,
    serving,
)

LIMIT: Final = Limit(1.6)


def s8_replicas(run: Run) -> Iterator[Row]:
    """Time for all scans of some clients, with two replicas and with one."""
    if run.fast:
        work = Work(small_scans(4), "generated scans", PHANTOM, 2, "cpu")
    else:
        work = Work(*skulls(16), SKULL, 8, "cpu")
    if not ONE_REPLICA.installed:
        yield absent(ONE_REPLICA, work.what, LIMIT)
        return
    detector = Detector(load_checked(work.model, torch.device(work.device)))
    expected = serial_loop.find_all(detector, work.contents)
    one, two = (_measure(kind, work, expected, run) for kind in (ONE_REPLICA, TWO_REPLICAS))
    yield Row(work.what, two, "ms", ONE_REPLICA.name, one, LIMIT, work.note, run.rounds)


def _measure(kind: Kind, work: Work, expected: Sequence[bytes], run: Run) -> float:
    """Give the median time in ms."""
    with serving(kind, work.model, DEVICE=work.device, THREADS="1") as server:
        # Ready is who can answer at all; both have the same start behind them.
        while len(replicas_of(server)) < int(kind.words[0]):
            pass
        check_all(server, work, expected)
        return statistics.median(1e3 * serve_all(server, work)[0] for _ in range(run.rounds))
