"""Rows -> a table to read and a CSV file to keep."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.table import Table

from tests.benchmarks.harness import Row
from tests.benchmarks.surroundings import Surroundings

COLOURS: Final = {"met": "green", "NOT met": "red", "not measured": "yellow"}


def table_of(rows: Mapping[str, Sequence[Row]]) -> Table:
    """Make the table of all bars.

    Args:
        rows: Rows by the name of their bar.

    Returns:
        One line per row.
    """
    table = Table("id", "what", "ours", "rival", "ratio", "bar", "", title="Benchmarks")
    for name, lines in rows.items():
        before = ""
        for number, row in enumerate(lines):
            what = f"{row.what} ({row.note})" if row.note else row.what
            table.add_row(name if number == 0 else "", "" if what == before else what, *_cells(row))
            before = what
        table.add_section()
    return table


def write_csv(path: Path, rows: Sequence[Row], surroundings: Surroundings) -> None:
    """Write the rows of one bar, each with where it was measured."""
    lines = [_record(row) | asdict(surroundings) for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def verdict(row: Row) -> str:
    """Say in words whether a row meets its bar; nothing if there is none."""
    if row.ours is None:
        return "not measured"
    return {None: "", True: "met", False: "NOT met"}[row.met]


def _cells(row: Row) -> list[str]:
    word = verdict(row)
    return [
        _figure(row.ours, row.unit),
        f"{_figure(row.theirs, row.unit)} {row.rival}".strip(),
        "" if row.ratio is None else f"{row.ratio:.3g}x",
        "" if row.limit is None else row.limit.text(row.unit),
        f"[{COLOURS[word]}]{word}[/]" if word else "",
    ]


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _record(row: Row) -> dict[str, object]:
    return {
        "what": row.what,
        "ours": _number(row.ours),
        "unit": row.unit,
        "rival": row.rival,
        "theirs": _number(row.theirs),
        "ratio": _number(row.ratio),
        "bar": "" if row.limit is None else row.limit.text(row.unit),
        "verdict": verdict(row),
        "note": row.note,
        "rounds": row.rounds,
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
