"""LandmarksAnswer -> bytes in the requested format: the registry of formats, and negotiation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from app.errors import UnknownFormat
from app.io.dicom import Evidence
from app.io.schemas import LandmarksAnswer
from app.io.slicer import (
    csv_text,
    write_fcsv,
    write_long,
    write_measurements,
    write_mrk_json,
    write_table,
)


@dataclass(frozen=True, slots=True)
class Format:
    """A format that a client can choose.

    Attributes:
        name: As in ``?format=``; also the file suffix.
        media_type: As in ``Accept`` and ``Content-Type``.
    """

    name: str
    media_type: str


@dataclass(frozen=True, slots=True)
class AnswerFormat(Format):
    """One way to write an answer."""

    write: Callable[[LandmarksAnswer], bytes]


F = TypeVar("F", bound=Format)

WIDE_COLUMNS: Final = ("reasons", "warnings")
"""Of a table with columns for each measurement, those behind them."""


def write_json(answer: LandmarksAnswer) -> bytes:
    """Write the whole answer as JSON."""
    return answer.model_dump_json().encode()


def write_wide(answer: LandmarksAnswer) -> bytes:
    """Write a CSV with one row, and columns for each measurement; empty cell: unknown."""
    measured = answer.measurements
    names = [f"{one.name}_{one.unit}" if one.unit else one.name for one in measured]
    bounds = [f"{name}_{bound}" for name in names for bound in ("low95", "high95")]
    cells = [
        *(one.value for one in measured),
        *(bound for one in measured for bound in one.interval95 or ("", "")),
        " | ".join(f"{one.name}: {one.reason}" for one in measured if one.reason),
        " | ".join(answer.warnings),
    ]
    return csv_text([[*names, *bounds, *WIDE_COLUMNS], cells]).encode()


# In order of preference: of two formats with one media type, Accept chooses the first.
FORMATS: Final = (
    AnswerFormat("json", "application/json", write_json),
    AnswerFormat("mrk.json", "application/vnd.slicer.markups+json", write_mrk_json),
    AnswerFormat("csv", "text/csv", write_table),
    AnswerFormat("tsv", "text/tab-separated-values", partial(write_table, separator="\t")),
    AnswerFormat("fcsv", "text/vnd.slicer.fcsv", write_fcsv),
    AnswerFormat("long", "text/csv", write_long),
    AnswerFormat("measurements", "text/csv", write_measurements),
    AnswerFormat("wide", "text/csv", write_wide),
)

REPORT: Final = Format("dcm", "application/dicom")

SCAN_FORMATS: Final[tuple[Format, ...]] = (*FORMATS, REPORT)
"""For an answer whose scan is at hand: a report refers to its images."""


def load_report_writer() -> Callable[[LandmarksAnswer, Evidence], bytes]:
    """Import what writes a report.

    Raises:
        UnknownFormat: It is not installed.
    """
    try:
        from app.io.dicom.report import write_report  # noqa: PLC0415 - it needs an extra
    except ModuleNotFoundError:
        raise UnknownFormat(
            "expected another format than dcm, for which the extra dicom is needed here: pip "
            "install 'landmarkd[dicom]'"
        ) from None
    return write_report


def write_answer(answer: LandmarksAnswer, form: str = "json") -> bytes:
    """Write an answer as the content of a file.

    Args:
        answer: Of the service.
        form: Name of the format: ``json``, ``mrk.json``, ``csv``, ``tsv``, ``fcsv``, ``long``,
            ``measurements`` or ``wide``.

    Raises:
        UnknownFormat: There is no such format.
    """
    return negotiate_format(FORMATS, form, None).write(answer)


def negotiate_format(formats: Sequence[F], name: str | None, accept: str | None) -> F:
    """Choose the format of an answer.

    Args:
        formats: The available formats, in order of preference.
        name: The ``format`` of the query; takes precedence over ``accept``.
        accept: The ``Accept`` header.

    Returns:
        The format; the first if neither is given.

    Raises:
        UnknownFormat: None of the formats is acceptable.
    """
    if name is not None:
        for form in formats:
            if form.name == name:
                return form
        known = ", ".join(form.name for form in formats)
        raise UnknownFormat(f"expected format one of {known}; got {name[:64]!r}")
    ranges = _ranges(accept or "*/*")
    ranked = [(_rank(form.media_type, ranges), form) for form in formats]
    # Of equal rank, max takes the first.
    (quality, _), best = max(ranked, key=lambda item: item[0])
    if quality > 0:
        return best
    known = ", ".join(dict.fromkeys(form.media_type for form in formats))
    raise UnknownFormat(f"expected Accept to allow one of {known}; got {(accept or '')[:128]!r}")


def _ranges(accept: str) -> list[tuple[str, float]]:
    """Split an Accept header into its media ranges and their qualities."""
    ranges = []
    for part in accept.split(","):
        pattern, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = max(0.0, float(parameter[2:]))  # Of NaN, 0.
                except ValueError:
                    quality = 0.0
        ranges.append((pattern, quality))
    return ranges


def _rank(media_type: str, ranges: list[tuple[str, float]]) -> tuple[float, int]:
    """Rank a media type: its quality by the most specific range (RFC 9110, 12.5.1), then order."""
    patterns = [pattern for pattern, _ in ranges]
    for pattern in (media_type, media_type.split("/", maxsplit=1)[0] + "/*", "*/*"):
        if pattern in patterns:
            index = patterns.index(pattern)
            return ranges[index][1], -index
    return 0.0, 0
