"""S1: many clients at once, against the same work without any serving."""

import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from app.detector import Detector
from app.loading import load_checked
from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.loads import Load, Stream, send
from tests.benchmarks.rivals import serial_loop
from tests.benchmarks.scans import PHANTOM, SKULL, skulls, small_scans
from tests.benchmarks.servers import OURS, Server, check_same, serving

BUSY: Final = 90.0
"""Percent of the time that a CUDA device shall work while clients wait."""

Measured = tuple[float, list[bytes]]


def s1_throughput(run: Run) -> Iterator[Row]:
    """Time for all scans of 8 clients, against a serial loop on the same device."""
    contents, note = skulls(16) if not run.fast else (small_scans(4), "generated scans")
    clients = 8 if not run.fast else 2
    model = SKULL if not run.fast else PHANTOM
    name = "cuda" if torch.cuda.is_available() else "cpu"
    detector = Detector(load_checked(model, torch.device(name)))
    with serving(OURS, model, DEVICE=name) as server, DeviceWatch() as watch:
        ours, theirs = [], []
        for turn in range(run.rounds + 1):
            watch.look = True
            spent, answers = _serve(server, contents, clients)
            watch.look = False
            start = time.perf_counter()
            expected = serial_loop.find_all(detector, contents)
            if turn == 0:
                for mine, yours in zip(answers, expected, strict=True):
                    check_same(mine, yours, "a serial loop")
                watch.seen.clear()
                continue
            ours.append(1e3 * spent)
            theirs.append(1e3 * (time.perf_counter() - start))
        what = f"{len(contents)} .nii.gz of {model.name} on {name}, {clients} clients"
        yield Row(
            what,
            statistics.median(ours),
            "ms",
            "serial Python loop",
            statistics.median(theirs),
            Limit(1.0),
            note,
            run.rounds,
        )
        yield watch.row()


def _serve(server: Server, contents: Sequence[bytes], clients: int) -> Measured:
    """Send all scans; gives seconds from the first byte sent to the last received, and answers."""
    messages = tuple(
        server.message(str(number), content, keep=True) for number, content in enumerate(contents)
    )
    replies = send(Load(server.port, (Stream(messages, clients, len(messages)),)))
    wrong = [(reply.status, reply.body[:200]) for reply in replies if reply.status != 200]
    if wrong:
        raise DisagreementError(f"expected status 200, got {wrong[0]}")
    answers = {int(reply.name): reply.body for reply in replies}
    spent = max(reply.start_s + reply.seconds for reply in replies)
    return spent, [answers[number] for number in range(len(contents))]


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
