"""training -> history.csv and curves.png: how the losses and the error on held-out scans went."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

# Without pyplot, which would look for a screen.
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.training.files import CURVES, HISTORY

SIZE_INCHES: Final = (7.0, 7.0)
DPI: Final = 110


@dataclass(frozen=True, slots=True)
class Moment:
    """How a training stood at some step.

    Attributes:
        step: Steps done.
        score_loss: Mean loss of the scores since the last moment or so.
        offset_loss: Likewise of the offsets.
        seconds: Spent on training until then, breaks left out.
        mean_mm: Mean error on the scans held out; None if it was not measured, or nothing found.
        p95_mm: 95th percentile of it.
        missed: Landmarks of these scans that were not found; None if it was not measured.
    """

    step: int
    score_loss: float
    offset_loss: float
    seconds: float
    mean_mm: float | None = None
    p95_mm: float | None = None
    missed: int | None = None


def read_history(folder: Path, steps: int) -> list[Moment]:
    """Read what a folder's history says up to a step; nothing if it has none."""
    path = folder / HISTORY
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        moments = [_moment(row) for row in csv.DictReader(lines)]
    return [moment for moment in moments if moment.step <= steps]


def write_history(folder: Path, moments: Sequence[Moment]) -> None:
    """Write the history as a table, one row per moment; what was not measured is empty."""
    partial = folder / f"{HISTORY}.partial"
    with partial.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow([field.name for field in fields(Moment)])
        writer.writerows(["" if x is None else x for x in astuple(moment)] for moment in moments)
    partial.replace(folder / HISTORY)


def draw_curves(folder: Path, moments: Sequence[Moment], title: str) -> None:
    """Draw the history as a picture.

    Args:
        folder: Where to.
        moments: The history.
        title: Of the picture.
    """
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    figure.suptitle(title)
    losses, errors = figure.subplots(2, 1, sharex=True)
    steps = [moment.step for moment in moments]
    for name, label in (("score_loss", "scores"), ("offset_loss", "offsets")):
        values = [getattr(moment, name) for moment in moments]
        losses.plot(steps, values, marker=".", label=label)
    losses.set_yscale("log")
    losses.set_ylabel("loss")
    losses.legend()
    _draw_errors(errors, moments)
    errors.set_xlabel("step")
    errors.set_xlim(left=0)
    partial = folder / f"{CURVES}.partial"
    figure.savefig(partial, format="png")
    partial.replace(folder / CURVES)


def _draw_errors(axes: Axes, moments: Sequence[Moment]) -> None:
    """Draw the errors on scans held out, or say that there are none."""
    measured = [
        (moment.step, moment.mean_mm, moment.p95_mm)
        for moment in moments
        if moment.mean_mm is not None and moment.p95_mm is not None
    ]
    axes.set_ylabel("error on scans held out, mm")
    if not measured:
        axes.text(0.5, 0.5, "none measured", transform=axes.transAxes, ha="center", va="center")
        return
    steps, mean_mm, p95_mm = zip(*measured, strict=True)
    axes.plot(steps, mean_mm, marker="o", label="mean")
    axes.plot(steps, p95_mm, marker="o", label="95th percentile")
    axes.set_ylim(0, 1.1 * max(p95_mm) + 1e-9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _moment(row: dict[str, str]) -> Moment:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    return Moment(
        step=int(row["step"]),
        score_loss=float(row["score_loss"]),
        offset_loss=float(row["offset_loss"]),
        seconds=float(row["seconds"]),
        mean_mm=number("mean_mm"),
        p95_mm=number("p95_mm"),
        missed=int(row["missed"]) if row["missed"] else None,
    )
