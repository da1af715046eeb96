"""LandmarksAnswer -> bytes in the requested format: the registry of formats, and negotiation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, runtime_checkable

from app.errors import UnknownFormat
from app.io.schemas import LandmarksAnswer
from app.io.slicer import write_csv, write_fcsv, write_long, write_mrk_json, write_tsv


@runtime_checkable
class FormatLike(Protocol):
    """What a format is chosen by."""

    @property
    def name(self) -> str:
        """As in ``?format=``."""

    @property
    def media_type(self) -> str:
        """As in ``Accept``."""


F = TypeVar("F", bound=FormatLike)


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write an answer.

    Attributes:
        name: As in ``?format=``; also the file suffix.
        media_type: As in ``Accept`` and ``Content-Type``.
        write: Turns the answer into bytes.
    """

    name: str
    media_type: str
    write: Callable[[LandmarksAnswer], bytes]


def write_json(answer: LandmarksAnswer) -> bytes:
    """Write the whole answer as JSON."""
    return answer.model_dump_json().encode()


# In order of preference: of two formats with one media type, Accept chooses the first.
FORMATS: Final = (
    Format("json", "application/json", write_json),
    Format("mrk.json", "application/vnd.slicer.markups+json", write_mrk_json),
    Format("csv", "text/csv", write_csv),
    Format("tsv", "text/tab-separated-values", write_tsv),
    Format("fcsv", "text/vnd.slicer.fcsv", write_fcsv),
    Format("long", "text/csv", write_long),
)


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
                    quality = float(parameter[2:])
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
