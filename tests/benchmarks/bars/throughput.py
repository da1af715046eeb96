"""S1, S10: many clients at once, and one, against the same work without serving, and rivals."""

import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from app.compute.device import fast_precisions
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import read_volume
from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.loads import Load, Stream, send
from tests.benchmarks.rivals import serial_loop
from tests.benchmarks.scans import PHANTOM, SKULL, skulls, small_scans
from tests.benchmarks.servers import (
    OURS,
    RIVALS,
    Kind,
    Server,
    absent,
    check_same,
    serving,
)

BUSY: Final = 90.0
"""Percent of the time that a CUDA device shall work while clients wait."""

Measured = tuple[float, list[bytes]]


@dataclass(frozen=True, slots=True)
class Work:
    """What all sides do.

    Attributes:
        contents: The scans.
        note: Whether they are real.
        model: The model folder.
        clients: That send them at the same time.
        device: That computes.
    """

    contents: Sequence[bytes]
    note: str
    model: Path
    clients: int
    device: str

    @property
    def what(self) -> str:
        """Say it, as in the table."""
        count, name = len(self.contents), self.model.name
        return f"{count} .nii.gz of {name} on {self.device}, {self.clients} clients"


def s1_throughput(run: Run) -> Iterator[Row]:
    """Time for all scans of 8 clients, against a serial loop on the same device and rivals."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if run.fast:
        work = Work(small_scans(4), "generated scans", PHANTOM, 2, device)
    else:
        work = Work(*skulls(16), SKULL, 8, device)
    detector = Detector(load_checked(work.model, torch.device(device), "auto"))
    expected = serial_loop.find_all(detector, work.contents)
    with DeviceWatch() as watch:
        ours, theirs = _measure_ours(work, detector, expected, watch, run)
        limit = Limit(1.5)
        yield Row(work.what, ours, "ms", "serial Python loop", theirs, limit, work.note, run.rounds)
        yield watch.row()
    # Rivals take no turns with a loop, after which a service is a little slower.
    ours = _measure_alone(OURS, work, expected, run)
    for kind in RIVALS:
        if not kind.installed:
            yield absent(kind, work.what)
            continue
        theirs = _measure_alone(kind, work, expected, run)
        native = "bfloat16" in fast_precisions(torch.device(device))
        limit = Limit(1.5 if native else 1.25)
        yield Row(work.what, ours, "ms", kind.name, theirs, limit, work.note, run.rounds)


def s10_overhead(run: Run) -> Iterator[Row]:
    """Time of one scan through the service, over that of the passes of its networks alone."""
    model, (contents, note) = SKULL, skulls(8)
    if run.fast:
        model, contents, note = PHANTOM, small_scans(2), "generated scans"
    detector = Detector(load_checked(model, torch.device("cpu"), "auto"))
    volumes = [read_volume(content) for content in contents]
    served, passes = [], []
    with serving(OURS, model, DEVICE="cpu") as server:
        messages = tuple(server.message("one", content, keep=True) for content in contents)
        for number in range(run.rounds + 1):
            replies = send(Load(server.port, (Stream(messages, count=len(messages)),)))
            times = [detector.detect(volume).timing.network for volume in volumes]
            if number:  # The first round chooses kernels and fills caches.
                served += [1e3 * reply.seconds for reply in replies if reply.status == 200]
                passes += times
    what = f"a .nii.gz of {model.name}, one client"
    limit = Limit(1.25, "cost")
    ours, theirs = statistics.median(served), statistics.median(passes)
    yield Row(what, ours, "ms", "its networks alone", theirs, limit, note, run.rounds)


def _measure_ours(
    work: Work, detector: Detector, expected: Sequence[bytes], watch: "DeviceWatch", run: Run
) -> tuple[float, float]:
    """Take turns with the serial loop; gives the medians of both in ms."""
    ours, theirs = [], []
    with serving(OURS, work.model, DEVICE=work.device) as server:
        check_all(server, work, expected)
        for _ in range(run.rounds):
            watch.look = True
            ours.append(1e3 * serve_all(server, work)[0])
            watch.look = False
            start = time.perf_counter()
            serial_loop.find_all(detector, work.contents)
            theirs.append(1e3 * (time.perf_counter() - start))
    return statistics.median(ours), statistics.median(theirs)


def _measure_alone(kind: Kind, work: Work, expected: Sequence[bytes], run: Run) -> float:
    with serving(kind, work.model, DEVICE=work.device) as server:
        check_all(server, work, expected)
        return statistics.median(1e3 * serve_all(server, work)[0] for _ in range(run.rounds))


def check_all(server: Server, work: Work, expected: Sequence[bytes]) -> None:
    """Compare the answers of a first round, which is not timed, with those of the serial loop."""
    for mine, yours in zip(expected, serve_all(server, work)[1], strict=True):
        check_same(mine, yours, server.kind.name, server.kind.same_mm)


def serve_all(server: Server, work: Work) -> Measured:
    """Send all scans; gives seconds from the first byte sent to the last received, and answers."""
    messages = tuple(
        server.message(str(number), content, keep=True)
        for number, content in enumerate(work.contents)
    )
    replies = send(Load(server.port, (Stream(messages, work.clients, len(messages)),)))
    wrong = [(reply.status, reply.body[:200]) for reply in replies if reply.status != 200]
    if wrong:
        raise DisagreementError(f"expected status 200, got {wrong[0]}")
    answers = {int(reply.name): reply.body for reply in replies}
    spent = max(reply.start_s + reply.seconds for reply in replies)
    return spent, [answers[number] for number in range(len(messages))]


class DeviceWatch:
    """How busy the CUDA device is, in percent, while somebody looks; nothing without one."""

    def __init__(self) -> None:
        self.look = False
        self.seen: list[float] = []

    def __enter__(self) -> "DeviceWatch":
        """Begin to read what the driver says, ten times a second."""
        self._process = None
        if torch.cuda.is_available():
            words = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
            self._process = subprocess.Popen(
                ["nvidia-smi", *words], stdout=subprocess.PIPE, text=True
            )
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the reading."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def row(self) -> Row:
        """Say how much of the time the device was idle."""
        what, limit = "time that the CUDA device is idle", Limit(100 - BUSY, "figure")
        if not self.seen:
            return Row(what, None, "%", limit=limit, note="no CUDA device here")
        return Row(what, 100 - statistics.mean(self.seen), "%", limit=limit)

    def _read(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            for line in self._process.stdout:
                if self.look:
                    self.seen.append(float(line))
