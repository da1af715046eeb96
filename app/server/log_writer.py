"""Writes log lines from a thread of its own, so that who reads them never holds up the service.

A pipe that is not read, or a full disk, would otherwise stop the event loop with the next line.
"""

import logging
import os
import queue
from collections.abc import Iterator
from threading import Thread
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

STDERR: Final = 2

MAX_LINES: Final = 10_000
"""Lines that wait to be written, a few MB; further ones are dropped."""

CLOSE_S: Final = 2.0
"""For the lines that still wait when the process ends."""


class LogWriter(logging.Handler, Collector):
    """Writes to a file descriptor, and drops what it cannot write.

    Not Python's ``QueueListener``: it would wait for ever at the end of the process, as would the
    lock of a stream that somebody writes to. As a collector of metrics, it has one: the number of
    lines that were dropped.
    """

    def __init__(self, file: int = STDERR) -> None:
        super().__init__()
        self._file = file
        self._refused = 0  # Lines that found the queue full.
        self._failed = 0  # Lines that could not be written.
        # Each line with the number of those that had been refused before it.
        self._lines: queue.Queue[tuple[bytes, int] | None] = queue.Queue(MAX_LINES)
        self._thread = Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written."""
        return self._refused + self._failed

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record; ``logging`` calls this from one thread at a time."""
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 - of a library, whose caller it must not reach
            line = self._unreadable(record)
        try:
            self._lines.put_nowait((line, self._refused))
        except queue.Full:
            self._refused += 1

    def close(self) -> None:
        """Write what waits, for a limited time."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            pass
        else:
            self._thread.join(CLOSE_S)
        super().close()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Read the metric."""
        yield CounterMetricFamily(
            "landmarkd_log_lines_dropped", "Log lines that could not be written.", self.dropped
        )

    def _line(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode(errors="replace") + b"\n"

    def _write_lines(self) -> None:
        """Write the lines, each after one that says how many were dropped before it."""
        reported = 0
        while (item := self._lines.get()) is not None:
            line, refused = item
            missing = refused + self._failed - reported
            try:
                self._write(self._report(missing) + line if missing else line)
            except OSError:  # Nobody reads any more, or the disk is full.
                self._failed += 1
            else:
                reported += missing

    def _report(self, count: int) -> bytes:
        return self._warning(__name__, "log lines dropped", lines=count)

    def _unreadable(self, record: logging.LogRecord) -> bytes:
        where = f"{record.module}:{record.lineno}"
        return self._warning(record.name, "a message does not fit its arguments", where=where)

    def _warning(self, name: str, message: str, **extra: object) -> bytes:
        fields = {"levelno": logging.WARNING, "levelname": "WARNING", "name": name, "msg": message}
        return self._line(logging.makeLogRecord(fields | extra))

    def _write(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._file, content) :]
