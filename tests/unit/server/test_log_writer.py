"""Log lines that cannot be written: dropped and counted, and nobody waits for them."""

import json
import logging
import os
import time
from collections.abc import Iterator
from typing import IO

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from app.server import log_writer
from app.server.log_format import JsonFormatter
from app.server.log_writer import LogWriter

LINES = 50
LONG = "x" * 10_000


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[IO[bytes], logging.Logger, LogWriter]]:
    """Make a pipe that nobody reads yet, and a logger that writes to it."""
    monkeypatch.setattr(log_writer, "MAX_LINES", LINES)
    monkeypatch.setattr(log_writer, "CLOSE_S", 0.2)
    reader, writer = os.pipe()
    handler = LogWriter(writer)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("test_log_writer")
    logger.addHandler(handler)
    logger.propagate = False
    with os.fdopen(reader, "rb") as stream:
        yield stream, logger, handler
    logger.removeHandler(handler)
    handler.close()
    os.close(writer)


Pipe = tuple[IO[bytes], logging.Logger, LogWriter]


def test_lines_are_written_in_order_and_at_the_end_all_of_them(pipe: Pipe) -> None:
    stream, logger, handler = pipe
    for number in range(LINES):
        logger.warning("line", extra={"number": number})
    handler.close()
    numbers = [json.loads(stream.readline())["number"] for _ in range(LINES)]
    assert numbers == list(range(LINES))
    assert handler.dropped == 0


def test_message_that_does_not_fit_its_arguments_reaches_no_caller(pipe: Pipe) -> None:
    stream, logger, handler = pipe
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 1, "%d voxels", ("many",), None)
    handler.handle(record)
    logger.warning("next")
    handler.close()
    first, second = (json.loads(stream.readline()) for _ in range(2))
    assert first["message"] == "a message does not fit its arguments"
    assert first["where"] == "test_log_writer:1"
    assert second["message"] == "next"


def test_nobody_waits_for_a_reader_and_dropped_lines_are_reported(pipe: Pipe) -> None:
    stream, logger, handler = pipe
    count = 10 * LINES
    start = time.monotonic()
    for number in range(count):
        logger.warning(LONG, extra={"number": number})
    assert time.monotonic() - start < 10
    # The pipe holds some lines, the queue some more.
    assert 0 < handler.dropped < count
    kept, expected = count - handler.dropped, 0
    line = json.loads(stream.readline())
    while line["message"] != "again":
        if line["message"] == LONG:
            assert line["number"] == expected
            expected += 1
            kept -= 1
        else:  # A report stands where the lines are missing.
            assert (line["message"], line["level"]) == ("log lines dropped", "warning")
            expected += line["lines"]
        if not kept:
            logger.warning("again")
            kept = -1
        line = json.loads(stream.readline())
    assert expected == count


def test_end_of_the_process_does_not_wait_for_a_reader(pipe: Pipe) -> None:
    _, logger, handler = pipe
    for _ in range(10 * LINES):
        logger.warning(LONG)
    start = time.monotonic()
    handler.close()
    assert time.monotonic() - start < 5


def test_lines_that_fail_are_counted(pipe: Pipe) -> None:
    stream, logger, handler = pipe
    stream.close()
    registry = CollectorRegistry()
    registry.register(handler)
    for _ in range(3):
        logger.warning("line")
    handler.close()
    assert handler.dropped == 3
    assert b"landmarkd_log_lines_dropped_total 3.0" in generate_latest(registry)


def test_lines_that_fail_are_reported_once_lines_can_be_written_again(pipe: Pipe) -> None:
    stream, logger, handler = pipe
    stream.close()
    for _ in range(3):
        logger.warning("line")
    while handler.dropped < 3:
        pass
    reader, writer = os.pipe()
    os.dup2(writer, handler._file)  # noqa: SLF001 - as if the reader were there again
    os.close(writer)
    logger.warning("again")
    with os.fdopen(reader, "rb") as again:
        report, line = (json.loads(again.readline()) for _ in range(2))
    assert (report["message"], report["lines"]) == ("log lines dropped", 3)
    assert line["message"] == "again"
