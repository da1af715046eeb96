"""Logs: one JSON object per line, without anything that may identify a patient."""

import json
import logging
import subprocess
import sys

import pytest

from app.api.request_log import RequestRecord, log_request
from app.server.log_format import JsonFormatter, TextFormatter, describe_exception


def line_of(formatter: logging.Formatter, error: BaseException | None = None) -> str:
    record = logging.makeLogRecord({"name": "app.x", "msg": "hello", "levelname": "INFO"})
    vars(record).update({"model": "toy", "tiles": 3})
    if error is not None:
        record.exc_info = (type(error), error, error.__traceback__)
    return formatter.format(record)


def raised() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        fail()
    return caught.value


def fail() -> None:
    try:
        int("Jane Doe")
    except ValueError as error:
        raise RuntimeError("Jane Doe again") from error


FILE_READERS_SAY = """
import logging, warnings
from app.server.log_format import configure_logging

log = configure_logging("debug", "json")
logging.getLogger("highdicom.sr.sop").info("copy Patient-related attributes from Jane")
logging.getLogger("pydicom").error("invalid name: Jane")
warnings.warn_explicit("invalid name: Jane", UserWarning, "valuerep.py", 1, "pydicom.valuerep")
logging.getLogger("app.x").info("hello")
log.close()
"""


@pytest.mark.no_cover
def test_what_libraries_say_of_the_files_they_read_is_not_logged() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FILE_READERS_SAY], capture_output=True, check=True, text=True
    )
    (line,) = run.stderr.splitlines()
    assert json.loads(line)["message"] == "hello"


LIBRARIES_SAY = """
import logging, warnings
import torch
from app.server.log_format import configure_logging

log = configure_logging("info", "json")
logging.getLogger("torch._dynamo").warning("by %s", "torch")
warnings.warn("of numpy", UserWarning)
log.close()
"""


def test_what_libraries_write_by_themselves_is_json_too() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIBRARIES_SAY], capture_output=True, check=True, text=True
    )
    by_torch, of_numpy = map(json.loads, run.stderr.splitlines())
    assert (by_torch["logger"], by_torch["message"]) == ("torch._dynamo", "by torch")
    assert "UserWarning: of numpy" in of_numpy["message"]


def test_line_is_a_json_object_with_its_fields() -> None:
    line = json.loads(line_of(JsonFormatter()))
    assert (line["message"], line["level"], line["logger"]) == ("hello", "info", "app.x")
    assert (line["model"], line["tiles"]) == ("toy", 3)
    assert line["time"].endswith("Z")


def test_line_for_a_terminal_is_one_line() -> None:
    line = line_of(TextFormatter(), raised())
    assert "\n" not in line
    assert "hello model=toy tiles=3" in line


def test_line_for_a_terminal_commands_no_terminal() -> None:
    reason = "toy: got '\x1b[2J\r\x9b2J\u202e'"
    record = logging.makeLogRecord({"msg": "model refused", "reason": reason})
    line = TextFormatter().format(record)
    assert line.isprintable()
    assert line.endswith(r"reason=toy: got '\x1b[2J\r\x9b2J\u202e'")


def test_exception_is_logged_by_types_and_functions_without_message() -> None:
    error = raised()
    line = line_of(JsonFormatter(), error)
    assert "Jane" not in line
    said = describe_exception(error)
    assert said.items() <= json.loads(line).items()
    assert said["error"] == "RuntimeError < ValueError"
    assert "fail" in str(said["where"])
    assert "/" not in str(said["where"])


def test_request_is_one_line_without_unknown_fields(caplog: pytest.LogCaptureFixture) -> None:
    log_request(RequestRecord("id", "GET", "/v1/models", 503, "not-ready", 1.23456))
    (line,) = caplog.records
    said = json.loads(JsonFormatter().format(line))
    assert (said["request_id"], said["status"], said["ms"]) == ("id", 503, 1.235)
    assert said["level"] == "warning"
    assert "model" not in said
