"""Writes log lines from a thread of its own, so that who reads them never holds up the service.

A pipe that is not read, or a full disk, would otherwise stop the event loop with the next line.
"""

import logging
import os
import queue
import select
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

STDERR: Final = 2

MAX_LINES: Final = 10_000
"""Lines that wait to be written, a few MB; further ones are dropped."""

CLOSE_S: Final = 2.0
"""For the lines that still wait when the process ends."""


@dataclass(frozen=True, slots=True)
class _Line:
    content: bytes
    counts: bool  # If it is dropped: not if it says only that others were.


class LogWriter(logging.Handler):
    """Writes to a file descriptor, and drops what it cannot write.

    Not Python's ``QueueListener``: it would wait for ever at the end of the process, as would the
    lock of a stream that somebody writes to.

    Attributes:
        dropped: Lines that were not written.

    Args:
        file: The descriptor.
    """

    def __init__(self, file: int = STDERR) -> None:
        super().__init__()
        self.dropped = 0
        self._file = file
        self._unreported = 0
        self._counting = Lock()
        self._lines: queue.Queue[_Line | None] = queue.Queue(MAX_LINES)
        self._thread = Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line, after one that says how many were dropped before it."""
        if not (self._report() and self._put(record)):
            self._count_dropped()

    def close(self) -> None:
        """Write what waits, for a limited time."""
        self._report()
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            pass
        else:
            self._thread.join(CLOSE_S)
        super().close()

    def register(self, registry: CollectorRegistry) -> None:
        """Add the number of dropped lines to the metrics."""
        registry.register(_DroppedLines(self))

    def _report(self) -> bool:
        """Queue a line that says how many were dropped; return whether none is left to report."""
        with self._counting:
            unreported, self._unreported = self._unreported, 0
        if not unreported or self._put(_report_of(unreported), counts=False):
            return True
        with self._counting:
            self._unreported += unreported
        return False

    def _put(self, record: logging.LogRecord, *, counts: bool = True) -> bool:
        line = self.format(record).encode(errors="replace") + b"\n"
        try:
            self._lines.put_nowait(_Line(line, counts))
        except queue.Full:
            return False
        return True

    def _count_dropped(self) -> None:
        with self._counting:
            self.dropped += 1
            self._unreported += 1

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line.content)
            except OSError:  # Nobody reads any more, or the disk is full.
                if line.counts:
                    self._count_dropped()

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._file, line) :]
            except BlockingIOError:
                select.select([], [self._file], [])


class _DroppedLines(Collector):
    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Read the counter."""
        yield CounterMetricFamily(
            "landmarkd_log_lines_dropped",
            "Log lines that could not be written.",
            value=self._writer.dropped,
        )


def _report_of(count: int) -> logging.LogRecord:
    fields = {"levelno": logging.WARNING, "levelname": "WARNING", "name": __name__}
    return logging.makeLogRecord({**fields, "msg": "log lines dropped", "lines": count})
