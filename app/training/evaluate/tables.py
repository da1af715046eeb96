"""Outcomes -> tables: for the terminal, and as CSV files."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from app.training.evaluate.metrics import (
    WITHIN_MM,
    group,
    measure_accuracy,
    measure_coverage,
    measure_presence,
)
from app.training.evaluate.outcomes import Outcome

WITHIN: Final = tuple(f"within_{radius:g}mm_%" for radius in WITHIN_MM)
LENGTHS: Final = ("mean_mm", "median_mm", "p95_mm", "largest_mm", "mean_voxels")
HEADINGS: Final = (
    "present", *LENGTHS, *WITHIN, "missed", "absent", "invented", "unknown", "in_region", "regions",
)  # fmt: skip
"""Of a line of figures. Missed: present, but not detected. Invented: absent, but detected.
Unknown: nobody knows which. In_region: how many errors lie within the region that they were told
with, of all such regions."""

COUNTS: Final = ("present", "missed", "absent", "invented", "unknown")

SHORT: Final = ("mean", "median", "p95", "max", "voxels", *(f"≤{mm:g}" for mm in WITHIN_MM))

MEANINGS: Final = (
    "Missed: present, but not detected. Invented: absent, but detected. Shares within a distance "
    "are of all present landmarks"
)
UNKNOWN: Final = (
    "Landmarks without a place in their files: {}. Nobody knows whether they are there, so they "
    "count as neither missed nor invented; with --missing absent, they are absent"
)

NO_FOLDS: Final[Mapping[str, str]] = MappingProxyType({})

Figures = dict[str, str]
"""Written figures by heading; empty where unknown."""


def sections(
    outcomes: Sequence[Outcome], folds: Mapping[str, str] = NO_FOLDS
) -> tuple[tuple[str, dict[str, Figures]], ...]:
    """Take the figures of all outcomes, and of those of each fold, each landmark and each scan.

    Args:
        outcomes: Of one model, or of those of folds.
        folds: The fold of each scan; none: there are no folds.

    Returns:
        A section for each, with the figures by name.
    """
    keys: dict[str, Callable[[Outcome], str]] = {
        "all": lambda _: "all",
        "fold": lambda outcome: folds[outcome.scan],
        "landmark": lambda outcome: outcome.landmark,
        "scan": lambda outcome: outcome.scan,
    }
    if not folds:
        del keys["fold"]
    return tuple(
        (title, {name: figures(members) for name, members in group(outcomes, key).items()})
        for title, key in keys.items()
    )


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """Write the figures of some outcomes."""
    accuracy, presence = measure_accuracy(outcomes), measure_presence(outcomes)
    inside, told = measure_coverage(outcomes)
    cells = dict.fromkeys(HEADINGS, "")
    if accuracy is not None:
        cells |= {name: f"{getattr(accuracy, name):.3f}" for name in LENGTHS}
        rates = zip(WITHIN, accuracy.within, strict=True)
        cells |= {name: f"{100 * share:.1f}" for name, share in rates}
    cells |= {name: str(getattr(presence, name)) for name in COUNTS}
    return cells | {"in_region": str(inside), "regions": str(told)}


def print_tables(
    outcomes: Sequence[Outcome], console: Console, folds: Mapping[str, str] = NO_FOLDS
) -> None:
    """Print the figures of all, of each landmark and of each scan, and what was told of presence.

    Args:
        outcomes: Of one model, or of those of folds.
        console: Where to.
        folds: The fold of each scan; none: there are no folds.
    """
    if not outcomes:
        return
    console.print("errors in mm, and the share of present landmarks placed within so many mm, in %")
    for title, lines in sections(outcomes, folds):
        table = Table(Column(title, overflow="fold"), box=None, padding=(0, 1, 0, 0))
        for heading in (*SHORT, "missed", "invented"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, cells in lines.items():
            missed = f"{cells['missed']}/{cells['present']}"
            invented = f"{cells['invented']}/{cells['absent']}"
            rates = (cells[key].partition(".")[0] for key in WITHIN)
            table.add_row(name, *(cells[key] for key in LENGTHS), *rates, missed, invented)
        console.print(table, "")
    console.print("missed: present, but not detected; invented: absent, but detected\n")
    table = Table("status", "of present", "of absent", box=None)
    presence = measure_presence(outcomes)
    for status, (there, gone) in presence.statuses.items():
        table.add_row(status, str(there), str(gone))
    console.print(table)
    if presence.unknown:
        console.print(UNKNOWN.format(presence.unknown))
    inside, told = measure_coverage(outcomes)
    if told:
        console.print(f"{100 * inside / told:.1f} % of {told} errors lie within their 95 % region")


def write_tables(
    outcomes: Sequence[Outcome], folder: Path, folds: Mapping[str, str] = NO_FOLDS
) -> None:
    """Write ``errors.csv``, a line per scan and landmark, and ``summary.csv``.

    Args:
        outcomes: Of one model, or of those of folds.
        folder: Where to.
        folds: The fold of each scan; none: there are no folds.
    """
    plain = [
        "scan", "landmark", "present", "status", "error_mm", "error_voxels",
        "confidence", "mass", "coherence", "region95_mm",
    ]  # fmt: skip
    places = [f"{which}_{axis}" for which in ("true", "found") for axis in "xyz"]
    lines: list[list[object]] = [[*plain, *places, *(["fold"] if folds else [])]]
    for outcome in outcomes:
        values = [_cell(getattr(outcome, name)) for name in plain]
        values[plain.index("present")] = outcome.present if outcome.known else ""
        points = [*_point(outcome.true_mm), *_point(outcome.found_mm)]
        lines.append([*values, *points, *([folds[outcome.scan]] if folds else [])])
    write_csv(folder / "errors.csv", lines)
    table: list[list[object]] = [["of", "name", *HEADINGS]]
    for title, rows in sections(outcomes, folds):
        table += [[title, name, *cells.values()] for name, cells in rows.items()]
    write_csv(folder / "summary.csv", table)


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.4f}" if np.isfinite(value) else ""
    return "" if value is None else value


def _point(point: np.ndarray | None) -> list[str]:
    return [""] * 3 if point is None else [f"{mm:.4f}" for mm in point]


def write_csv(path: Path, lines: Iterable[Sequence[object]]) -> None:
    """Write lines of cells as a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
