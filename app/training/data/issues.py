"""Findings -> table: what is wrong with training data, said once, worst first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.table import Table

Severity = Literal["error", "warning", "note"]

COLOURS: Final[dict[Severity, str]] = {"error": "red", "warning": "yellow", "note": "dim"}
"""By severity, worst first. Errors stop a training, warnings only where that is asked for."""

NAMED: Final = 3
"""Files that a row names; of the others it gives the number."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know about the data before anything is trained on them.

    Attributes:
        severity: Whether it makes what is trained wrong, may do so, or is only worth knowing.
        where: The scan or file; findings that say the same of several share a row.
        what: What was expected and what came, in one sentence or two.
    """

    severity: Severity
    where: str
    what: str


def count(findings: Iterable[Finding], severity: Severity) -> int:
    """Count the findings of a severity."""
    return sum(finding.severity == severity for finding in findings)


def table_of(findings: Sequence[Finding]) -> Table:
    """Lay findings out, worst first, one row for all files of which the same is said."""
    table = Table("", "where", "what", show_lines=False)
    for severity, colour in COLOURS.items():
        rows: dict[str, list[str]] = {}
        for finding in findings:
            if finding.severity == severity:
                rows.setdefault(finding.what, []).append(finding.where)
        for what, where in rows.items():
            table.add_row(
                f"[{colour}]{severity}[/{colour}]", _literal(listed(where)), _literal(what)
            )
    return table


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """List names, and of those beyond a few only how many they are."""
    unique = list(dict.fromkeys(names))
    if len(unique) <= most + 1:
        return ", ".join(unique)
    return f"{', '.join(unique[:most])} and {len(unique) - most} more"


def _literal(text: str) -> str:
    """Keep rich from reading brackets in file names as markup."""
    return text.replace("[", "\\[")
