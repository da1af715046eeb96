"""Log lines as JSON objects or as text.

No line contains a file name, header text, voxel value or exception message, because they may
identify a patient. Of an exception, its type and the functions of its traceback are logged.
"""

import json
import logging
import re
import sys
import time
import traceback
import warnings
from typing import Final, Literal

from app.errors import StartupError, show_controls
from app.server.log_writer import LogWriter

# Attributes of every LogRecord; color_message is uvicorn's.
_STANDARD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}

FILE_READERS: Final = ("highdicom", "nibabel", "pydicom")
"""They log, and warn of, what stands in the files they read: UIDs, or what is wrong with a name."""

TEXT_WRITERS: Final = re.compile(r"(nibabel|torch)\b")
"""Names of loggers that write text to standard error by themselves. (Ray's write files, too.)"""


def configure_logging(
    level: Literal["debug", "info", "warning", "error"], log_format: Literal["json", "text"]
) -> LogWriter:
    """Write the log of the process to standard error."""
    handler = LogWriter()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(lambda record: record.name.partition(".")[0] not in FILE_READERS)
    warnings.filterwarnings("ignore", module=f"({'|'.join(FILE_READERS)})\\b")
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    names = [*logging.root.manager.loggerDict]  # A copy: another thread may add to it.
    for logger in map(logging.getLogger, filter(TEXT_WRITERS.match, names)):
        # PyTorch from 2.14 on has a class of its own for it.
        if any(getattr(one, "stream", None) is sys.stderr for one in logger.handlers):
            logger.handlers.clear()
            logger.propagate = True
    # It logs every request of the demo, which the service logs, too.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # At debug level it logs every instruction that it compiles.
    logging.getLogger("numba").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return handler


def _is_news(record: logging.LogRecord) -> bool:
    """Drop the traceback of what the operator got wrong: the application has logged the reason."""
    text = record.getMessage()
    return not (text.startswith("Traceback ") and StartupError.__name__ in text)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """One line of text per record, for terminals."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        head = f"{_utc(record.created)} {record.levelname.lower():7} {record.name}"
        line = f"{head} {record.getMessage()}{fields}".replace("\n", " ")
        return show_controls(line)  # Reasons quote files that others made, such as models.


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Collect the fields given as ``extra``, and the description of an exception."""
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD_ATTRIBUTES}
    if record.exc_info and record.exc_info[1] is not None:
        fields.update(describe_exception(record.exc_info[1]))
    return fields


def describe_exception(error: BaseException) -> dict[str, object]:
    """Describe an exception without its message, paths or values.

    Returns:
        ``error``: the types from the outermost to the cause; ``where``: the functions of the
        cause's traceback, innermost first.
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
