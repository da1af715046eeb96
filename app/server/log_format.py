"""What happens in the service -> log lines: one JSON object each, one line per request.

No line holds a file name, header text, voxel value or exception message: those may identify a
patient. An exception leaves its type and the functions it went through.
"""

import json
import logging
import sys
import time
import traceback
from typing import Final, Literal

# What every LogRecord has; color_message is uvicorn's.
_OWN_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


def configure_logging(
    level: Literal["debug", "info", "warning", "error"], log_format: Literal["json", "text"]
) -> None:
    """Send every log line of the process to standard error, in one format.

    Args:
        level: Least severe level that is written.
        log_format: ``json``, or ``text`` for a terminal.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # httpx logs every request that the demo sends; the service logs them already.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # At debug level it tells every instruction that it compiles.
    logging.getLogger("numba").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """Write a log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Write a log record as one line for a person."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        head = f"{_utc(record.created)} {record.levelname.lower():7} {record.name}"
        return f"{head} {record.getMessage()}{fields}".replace("\n", " ")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Collect what was given as ``extra``, and what an exception may say."""
    fields = {key: value for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES}
    if record.exc_info and record.exc_info[1] is not None:
        fields.update(describe_exception(record.exc_info[1]))
    return fields


def describe_exception(error: BaseException) -> dict[str, object]:
    """Say what went wrong and where, without the message, a path or a value.

    Args:
        error: The exception.

    Returns:
        ``error``, the types from the outermost to the cause, and ``where``, the functions of the
        traceback from the innermost out.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    where = [
        f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}:{line}"
        for frame, line in traceback.walk_tb(chain[-1].__traceback__)
    ]
    types = " < ".join(type(link).__name__ for link in chain)
    return {"error": types, "where": where[::-1][:12]}


def _utc(seconds: float) -> str:
    milliseconds = int(seconds % 1 * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"
