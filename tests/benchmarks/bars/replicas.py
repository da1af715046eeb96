"""S8: two replicas on Ray Serve against one, one thread each, clients apart."""

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import torch

from app.inference.detector import Detector
from app.inference.load import load_checked
from tests.benchmarks.bars.throughput import Work, check_all, serve_all
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.linux import bind
from tests.benchmarks.rivals import serial_loop
from tests.benchmarks.scans import PHANTOM, SKULL, skulls, small_scans
from tests.benchmarks.servers import (
    ONE_REPLICA,
    TWO_REPLICAS,
    Kind,
    Server,
    absent,
    replica_processes,
    replicas_of,
    serving,
)

LIMIT: Final = Limit(1.6)


@dataclass(frozen=True, slots=True)
class Times:
    """Median times of all scans, in ms.

    Attributes:
        free: A replica has one thread that runs the network, and the cores that are free for what
            it does besides: receiving, decoding, preparing, locating.
        bound: A replica has one core for all of that.
    """

    free: float
    bound: float


def s8_replicas(run: Run) -> Iterator[Row]:
    """Time for all scans of some clients, with two replicas and with one."""
    if run.fast:
        work = Work(small_scans(4), "generated scans", PHANTOM, 2, "cpu")
    else:
        work = Work(*skulls(16), SKULL, 8, "cpu")
    if not ONE_REPLICA.installed:
        yield absent(ONE_REPLICA, work.what, LIMIT)
        return
    detector = Detector(load_checked(work.model, torch.device(work.device), "auto"))
    expected = serial_loop.find_all(detector, work.contents)
    one, two = (_measure(kind, work, expected, run) for kind in (ONE_REPLICA, TWO_REPLICAS))
    rival, rounds = ONE_REPLICA.name, run.rounds
    yield Row(work.what, two.free, "ms", rival, one.free, LIMIT, work.note, rounds)
    what = f"{work.what}, each replica bound to one core"
    yield Row(what, two.bound, "ms", rival, one.bound, Limit(None), work.note, rounds)


def _measure(kind: Kind, work: Work, expected: Sequence[bytes], run: Run) -> Times:
    with serving(kind, work.model, DEVICE=work.device, THREADS="1") as server:
        # Ready is who can answer at all; both have the same start behind them.
        while len(replicas_of(server)) < int(kind.words[0]):
            pass
        check_all(server, work, expected)
        free = _median(server, work, run)
        cores = cycle(sorted(os.sched_getaffinity(0)))
        for process, core in zip(replica_processes(server), cores, strict=False):
            bind(process, core)
        return Times(free, _median(server, work, run))


def _median(server: Server, work: Work, run: Run) -> float:
    return statistics.median(1e3 * serve_all(server, work)[0] for _ in range(run.rounds))
