"""Outcomes -> tables of metrics, for the terminal and as CSV files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from app.durable import write_file
from app.errors import show_controls
from app.io import csv_text
from app.training.data.issues import LINE_NAMES, print_warning, shorten
from app.training.evaluate.digits import format_number
from app.training.evaluate.metrics import (
    WITHIN_MM,
    errors_mm,
    group,
    measure_coverage,
    measure_presence,
)
from app.training.evaluate.outcomes import Outcome

WITHIN: Final = tuple(f"within_{radius:g}mm_%" for radius in WITHIN_MM)
IDENTIFIED: Final = "identified_%"
LENGTHS: Final = ("mean_mm", "median_mm", "p95_mm", "largest_mm", "mean_voxels")
HEADINGS: Final = (
    "present", *LENGTHS, *WITHIN, IDENTIFIED, "missed", "absent", "invented", "unknown",
    "doubtful", "in_region", "regions",
)  # fmt: skip
"""Columns of ``summary.csv``. Missed: present, but not detected. Invented: absent, but detected.
Unknown: of unknown presence. Doubtful: with a position, but of low confidence. In_region: errors
within their 95 % region, of all ``regions``."""

COUNTS: Final = ("present", "missed", "absent", "invented", "unknown")

SHORT: Final = ("mean", "median", "p95", "max")
FINE: Final = slice(0, 3)
COARSE: Final = slice(3, 6)
"""Success detection rates in the terminal: the finest, unless a typical error is above 1 mm."""

MEANINGS: Final = (
    "Missed: present, but not detected. Invented: absent, but detected. Shares within a distance "
    "are of all present landmarks"
)
UNKNOWN: Final = (
    "Landmarks without a position in their files: {}. Nobody knows whether they are present, so "
    "they count as neither missed nor invented; with --missing absent, they count as absent"
)

NO_FOLDS: Final[Mapping[str, str]] = MappingProxyType({})

Cells = dict[str, str]
"""Formatted metrics by heading; empty where unknown."""


def sections(
    outcomes: Sequence[Outcome], folds: Mapping[str, str] = NO_FOLDS
) -> tuple[tuple[str, dict[str, Cells]], ...]:
    """Compute the metrics of all outcomes, and of each group, fold, landmark and scan.

    ``folds`` has the fold of each scan; it is empty where there are none.

    Returns:
        Title and rows of each section.
    """
    keys: dict[str, Callable[[Outcome], str]] = {
        "all": lambda _: "all",
        "group": lambda outcome: outcome.group or "other",
        "fold": lambda outcome: folds[outcome.scan],
        "landmark": lambda outcome: outcome.landmark,
        "scan": lambda outcome: outcome.scan,
    }
    if not folds:
        del keys["fold"]
    if not any(outcome.group for outcome in outcomes):
        del keys["group"]
    return tuple(
        (title, {name: format_metrics(members) for name, members in group(outcomes, key).items()})
        for title, key in keys.items()
    )


def format_metrics(outcomes: Sequence[Outcome]) -> Cells:
    """Compute and format the metrics of some outcomes."""
    mm, presence = errors_mm(outcomes), measure_presence(outcomes)
    within, regions = measure_coverage(outcomes)
    cells = dict.fromkeys(HEADINGS, "")
    if mm.size:
        voxels = np.nanmean([outcome.error_voxels for outcome in outcomes])
        lengths = (mm.mean(), np.median(mm), np.percentile(mm, 95), mm.max(), voxels)
        cells |= zip(LENGTHS, map(format_number, lengths), strict=True)
    if presence.present:  # Rates are of all these, so that a missed one counts as a failure.
        counts = [
            *((mm <= radius).sum() for radius in WITHIN_MM),
            sum(one.identified for one in outcomes),
        ]
        rates = (f"{100 * count / presence.present:.1f}" for count in counts)
        cells |= zip((*WITHIN, IDENTIFIED), rates, strict=True)
    cells |= {name: str(getattr(presence, name)) for name in COUNTS}
    doubtful = sum(outcome.status == "low_confidence" for outcome in outcomes)
    return cells | {
        "doubtful": str(doubtful), "in_region": str(within), "regions": str(regions),
    }  # fmt: skip


def list_warnings(outcomes: Sequence[Outcome]) -> list[str]:
    """List what the answers warn of: each warning once, behind the scans that it is about."""
    scans: dict[str, list[str]] = {}
    for outcome in outcomes:
        for warning in outcome.warnings:
            scans.setdefault(warning, []).append(outcome.scan)
    return [f"{shorten(names, LINE_NAMES)}: {warning}" for warning, names in scans.items()]


def print_tables(
    outcomes: Sequence[Outcome], console: Console, folds: Mapping[str, str] = NO_FOLDS
) -> None:
    """Print the metrics of all outcomes, of each landmark and of each scan; presence; warnings."""
    if not outcomes:
        return
    console.print("errors in mm, and the share of present landmarks placed within so many mm, in %")
    mm = errors_mm(outcomes)
    shown = COARSE if mm.size and np.median(mm) > 1.0 else FINE
    radii = [f"≤{mm:g}" for mm in WITHIN_MM[shown]]
    columns = (*WITHIN[shown], IDENTIFIED)
    for title, rows in sections(outcomes, folds):
        table = Table(Column(title, overflow="fold"), box=None, padding=(0, 1, 0, 0))
        for heading in (*SHORT, *radii, "named", "missed", "invented"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, cells in rows.items():
            missed = f"{cells['missed']}/{cells['present']}"
            invented = f"{cells['invented']}/{cells['absent']}"
            shown_cells = [cells[key] for key in (*LENGTHS[: len(SHORT)], *columns)]
            table.add_row(show_controls(name), *shown_cells, missed, invented)
        console.print(table, "")
    console.print(
        "named: nearer to their own point than to another's, and within 20 mm, in %; "
        "missed: present, but not detected; invented: absent, but detected\n"
    )
    table = Table("status", "of present", "of absent", box=None)
    presence = measure_presence(outcomes)
    for status, (present, absent) in presence.statuses.items():
        table.add_row(status, str(present), str(absent))
    console.print(table)
    if presence.unknown:
        console.print(UNKNOWN.format(presence.unknown))
    within, regions = measure_coverage(outcomes)
    if regions:
        share = 100 * within / regions
        console.print(f"{share:.1f} % of {regions} errors lie within their 95 % region")
    print_warning("\n".join(list_warnings(outcomes)), console)


def write_tables(
    outcomes: Sequence[Outcome], folder: Path, folds: Mapping[str, str] = NO_FOLDS
) -> None:
    """Write ``errors.csv``, a line per scan and landmark, and ``summary.csv``."""
    plain = [
        "scan", "landmark", "present", "status", "error_mm", "error_voxels", "identified",
        "confidence", "mass", "coherence", "region95_mm", "warnings",
    ]  # fmt: skip
    coordinates = [f"{which}_{axis}" for which in ("true", "found") for axis in "xyz"]
    lines: list[list[object]] = [[*plain, *coordinates, *(["fold"] if folds else [])]]
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
    if isinstance(value, tuple):
        return " | ".join(value)
    if isinstance(value, float):
        return format_number(value, 4) if np.isfinite(value) else ""
    return "" if value is None else value


def _point(point: np.ndarray | None) -> list[str]:
    return [""] * 3 if point is None else [f"{mm:.6f}" for mm in point]


def write_csv(path: Path, lines: Iterable[Sequence[object]]) -> None:
    """Write lines of cells as a CSV file, whole or not at all."""
    write_file(path, csv_text(lines).encode())
