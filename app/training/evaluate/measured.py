"""Outcomes -> errors of the measurements that a model names, and coverage of their intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from app.measurements import MeasurementSpec, measure_landmarks
from app.training.evaluate.digits import format_number
from app.training.evaluate.metrics import group
from app.training.evaluate.outcomes import Outcome
from app.training.evaluate.tables import write_csv

MEASUREMENT_HEADINGS: Final = (
    "measurement", "unit", "scans", "mean_error", "p95_error", "interval_±", "held_%",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deviation:
    """One measurement of one scan against the truth, and half the width of its 95 % interval."""

    spec: MeasurementSpec
    true: float
    found: float
    half_width: float | None

    @property
    def error(self) -> float:
        """Absolute difference; of angles at most 180 degrees."""
        return abs(self.spec.difference(self.found, self.true))


def compare_measurements(
    specs: Sequence[MeasurementSpec], outcomes: Sequence[Outcome]
) -> tuple[Deviation, ...]:
    """Measure between the points of the answers and between the true ones.

    Returns:
        One deviation for each scan and measurement whose points are all present and found.
    """
    deviations = []
    for members in group(outcomes, lambda outcome: outcome.scan).values():
        radii = {one.landmark: one.region95_mm for one in members if one.status == "detected"}
        true = measure_landmarks(specs, {one.landmark: one.true_mm for one in members}, {})
        found = measure_landmarks(specs, {one.landmark: one.found_mm for one in members}, radii)
        deviations += [
            Deviation(spec, before.value, after.value, after.half_width)
            for spec, before, after in zip(specs, true, found, strict=True)
            if before.value is not None and after.value is not None
        ]
    return tuple(deviations)


def measurement_rows(deviations: Sequence[Deviation]) -> list[list[str]]:
    """List name, unit, count, mean and 95th percentile of the error, intervals and their share."""
    rows = []
    for name, members in group(deviations, lambda one: one.spec.name).items():
        errors = np.array([one.error for one in members])
        held = [one.error <= one.half_width for one in members if one.half_width is not None]
        width = [one.half_width for one in members if one.half_width is not None]
        rows.append(
            [
                name,
                members[0].spec.unit,
                str(len(members)),
                format_number(errors.mean(), 2),
                format_number(np.percentile(errors, 95), 2),
                format_number(float(np.mean(width)), 2) if width else "",
                f"{100 * np.mean(held):.1f}" if held else "",
            ]
        )
    return rows


def print_measurements(deviations: Sequence[Deviation], console: Console) -> None:
    """Print a row for each measurement: its errors, and how many its intervals hold."""
    if not deviations:
        return
    table = Table(Column(MEASUREMENT_HEADINGS[0], overflow="fold"), box=None, padding=(0, 1, 0, 0))
    for heading in MEASUREMENT_HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in measurement_rows(deviations):
        table.add_row(*row)
    console.print(table)
    held = [one.error <= one.half_width for one in deviations if one.half_width is not None]
    if held:
        share = 100 * float(np.mean(held))
        console.print(f"{share:.1f} % of {len(held)} measurements lie within their 95 % interval")


def write_measurements(deviations: Sequence[Deviation], folder: Path) -> None:
    """Write ``measurements.csv``, if there are any."""
    if deviations:
        lines = [MEASUREMENT_HEADINGS, *measurement_rows(deviations)]
        write_csv(folder / "measurements.csv", lines)
