"""What is wrong with training data, or worth knowing about them, and how it is printed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.errors import show_controls
from app.io import name_in_utf8

Severity = Literal["error", "warning", "note"]

COLOURS: Final[dict[Severity, str]] = {"error": "red", "warning": "yellow", "note": "dim"}
"""By severity, worst first. Errors stop a training; warnings only with ``--strict``."""

MAX_NAMES: Final = 3
"""Names that a row of the table lists; the others are counted."""

LINE_NAMES: Final = 8
"""Names that a line of text lists."""


@dataclass(frozen=True, slots=True)
class Issue:
    """Something to know about the data before training on them.

    Attributes:
        severity: Whether the data are wrong, may be wrong, or this is only worth knowing.
        where: The scan or file; issues with one message share a row of the table.
        message: What was expected and what was found.
    """

    severity: Severity
    where: str
    message: str


def count_issues(issues: Iterable[Issue], severity: Severity) -> int:
    """Count the issues of one severity."""
    return sum(issue.severity == severity for issue in issues)


def issue_table(issues: Sequence[Issue]) -> Table:
    """Lay out issues, worst first, with one row for all files that share a message."""
    table = Table("", "where", "what")
    for severity, colour in COLOURS.items():
        rows: dict[str, list[str]] = {}
        for issue in issues:
            if issue.severity == severity:
                rows.setdefault(issue.message, []).append(issue.where)
        for message, where in rows.items():
            # As Text, of which no bracket is taken for markup.
            what = Text(show_controls(message))
            table.add_row(Text(severity, colour), Text(shorten(where)), what)
    return table


def print_warning(message: str, console: Console, style: str = "yellow") -> None:
    """Print a warning, or what failed, in lines of its own; nothing if it is empty."""
    if message:
        text = show_controls(message, kept="\n")  # It may quote a model, or a file.
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def shorten(names: Sequence[str], limit: int = MAX_NAMES) -> str:
    """Join distinct names with commas, to be printed; beyond the limit, only count them."""
    unique = list(dict.fromkeys(show_controls(name_in_utf8(name)) for name in names))
    if len(unique) <= limit + 1:
        return ", ".join(unique)
    return f"{', '.join(unique[:limit])} and {len(unique) - limit} more"
