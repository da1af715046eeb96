"""Outcomes -> tables: for the terminal, and as CSV files."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from models.figures import (
    WITHIN_MM,
    group,
    measure_accuracy,
    measure_coverage,
    measure_presence,
)
from models.validate import Outcome

WITHIN: Final = tuple(f"within_{radius:g}mm_%" for radius in WITHIN_MM)
LENGTHS: Final = ("mean_mm", "median_mm", "p95_mm", "largest_mm", "mean_voxels")
HEADINGS: Final = (
    "present", *LENGTHS, *WITHIN, "missed", "absent", "invented", "in_region", "regions",
)  # fmt: skip
"""Of a line of figures. Missed: present, but not detected. Invented: absent, but detected.
In_region: how many errors lie within the region that they were told with, of all such regions."""

SHORT: Final = ("mean", "median", "p95", "max", "voxels", *(f"≤{mm:g}" for mm in WITHIN_MM))

Figures = dict[str, str]
"""Written figures by heading; empty where unknown."""


def sections(outcomes: Sequence[Outcome]) -> tuple[tuple[str, dict[str, Figures]], ...]:
    """Take the figures of all outcomes, of those of each landmark, and of those of each scan."""
    by_landmark = group(outcomes, lambda outcome: outcome.landmark)
    by_scan = group(outcomes, lambda outcome: outcome.scan)
    return (
        ("all", {"all": figures(outcomes)}),
        ("landmark", {name: figures(members) for name, members in by_landmark.items()}),
        ("scan", {name: figures(members) for name, members in by_scan.items()}),
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
    cells |= {
        name: str(getattr(presence, name)) for name in ("present", "missed", "absent", "invented")
    }
    return cells | {"in_region": str(inside), "regions": str(told)}


def print_tables(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the figures of all, of each landmark and of each scan, and what was told of presence.

    Args:
        outcomes: Of one model.
        console: Where to.
    """
    if not outcomes:
        return
    console.print("errors in mm, and the share of present landmarks placed within so many mm, in %")
    for title, lines in sections(outcomes):
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
    for status, (there, gone) in measure_presence(outcomes).statuses.items():
        table.add_row(status, str(there), str(gone))
    console.print(table)
    inside, told = measure_coverage(outcomes)
    if told:
        console.print(f"{100 * inside / told:.1f} % of {told} errors lie within their 95 % region")


def write_tables(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write ``errors.csv``, a line per scan and landmark, and ``summary.csv``.

    Args:
        outcomes: Of one model.
        folder: Where to.
    """
    plain = [
        "scan", "landmark", "present", "status", "error_mm", "error_voxels",
        "confidence", "mass", "coherence", "region95_mm",
    ]  # fmt: skip
    places = [f"{which}_{axis}" for which in ("true", "found") for axis in "xyz"]
    lines: list[list[object]] = [[*plain, *places]]
    for outcome in outcomes:
        values = [_cell(getattr(outcome, name)) for name in plain]
        points = [*_point(outcome.true_mm), *_point(outcome.found_mm)]
        lines.append([*values, *points])
    _write(folder / "errors.csv", lines)
    table: list[list[object]] = [["of", "name", *HEADINGS]]
    for title, rows in sections(outcomes):
        table += [[title, name, *cells.values()] for name, cells in rows.items()]
    _write(folder / "summary.csv", table)


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.4f}" if np.isfinite(value) else ""
    return "" if value is None else value


def _point(point: np.ndarray | None) -> list[str]:
    return [""] * 3 if point is None else [f"{mm:.4f}" for mm in point]


def _write(path: Path, lines: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
