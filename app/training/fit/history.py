"""``history.csv`` and ``curves.png``: losses and held-out errors over the steps of a training."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

# Without pyplot, which would look for a display.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import TypeAdapter

from app.durable import replacing, write_file
from app.io import csv_text
from app.training.files import CURVES, HISTORY, refuse_damaged

SIZE_INCHES: Final = (7.0, 7.0)
DPI: Final = 110


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """The state of a training at some step; field names are the columns of the table.

    Losses are running means, seconds those of training so far, without interruptions. Errors in mm,
    the mean and the 95th percentile, are on the held-out scans, ``not_found`` counts their
    landmarks without a position; None: not measured, or nothing was found.
    """

    step: int
    score_loss: float
    offset_loss: float
    seconds: float
    mean_mm: float | None = None
    p95_mm: float | None = None
    not_found: int | None = None


def read_history(folder: Path, steps: int) -> list[HistoryRow]:
    """Read the history of a folder up to a step; empty if it has none.

    Raises:
        StartupError: It is damaged.
    """
    path = folder / HISTORY
    if not path.exists():
        return []
    with refuse_damaged(path), path.open(encoding="utf-8", newline="") as lines:
        cells = [
            {name: cell or None for name, cell in row.items()} for row in csv.DictReader(lines)
        ]
        rows = TypeAdapter(list[HistoryRow]).validate_python(cells)
    return [row for row in rows if row.step <= steps]


def write_history(folder: Path, rows: Sequence[HistoryRow]) -> None:
    """Write the history as a table; what was not measured is empty."""
    columns = [field.name for field in fields(HistoryRow)]
    write_file(folder / HISTORY, csv_text([columns, *map(astuple, rows)]).encode())


def draw_curves(folder: Path, rows: Sequence[HistoryRow], title: str) -> None:
    """Plot the history."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI)
    figure.suptitle(title)
    losses, errors = figure.subplots(2, 1, sharex=True)
    steps = [row.step for row in rows]
    for name, label in (("score_loss", "scores"), ("offset_loss", "offsets")):
        losses.plot(steps, [getattr(row, name) for row in rows], marker=".", label=label)
    losses.set_yscale("log")
    losses.set_ylabel("loss")
    losses.legend()
    _draw_errors(errors, rows)
    errors.set_xlabel("step")
    errors.set_xlim(left=0)
    with replacing(folder / CURVES) as path:
        figure.savefig(path, format="png")


def _draw_errors(axes: Axes, rows: Sequence[HistoryRow]) -> None:
    """Plot the errors on held-out scans, or say that there are none."""
    measured = [
        (row.step, row.mean_mm, row.p95_mm)
        for row in rows
        if row.mean_mm is not None and row.p95_mm is not None
    ]
    axes.set_ylabel("error on held-out scans, mm")
    if not measured:
        axes.text(0.5, 0.5, "none measured", transform=axes.transAxes, ha="center", va="center")
        return
    steps, mean_mm, p95_mm = zip(*measured, strict=True)
    axes.plot(steps, mean_mm, marker="o", label="mean")
    axes.plot(steps, p95_mm, marker="o", label="95th percentile")
    axes.set_ylim(0, 1.1 * max(p95_mm) + 1e-9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
