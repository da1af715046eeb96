"""Outcomes -> the figures that say how good a model is."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.training.evaluate.outcomes import Outcome

WITHIN_MM: Final = (0.25, 0.5, 1.0, 2.0)
"""Radii of the success detection rates."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far off the landmarks are that were placed and are there.

    Attributes:
        count: How many there are.
        mean_mm: Mean radial error, as are those that follow its quantiles and its largest.
        median_mm: Half of the errors are below.
        p95_mm: 95 % of the errors are below.
        largest_mm: The largest.
        mean_voxels: Mean in voxels of each scan.
        within: Success detection rates: share of all *present* landmarks that were placed within
            each of ``WITHIN_MM``, so what was missed counts as a failure.
    """

    count: int
    mean_mm: float
    median_mm: float
    p95_mm: float
    largest_mm: float
    mean_voxels: float
    within: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Presence:
    """How well a model tells whether a landmark is there.

    Attributes:
        present: Landmarks that are there.
        missed: Those of them that are not called detected: false absent.
        absent: Landmarks that are not there.
        invented: Those of them that are called detected: false present.
        unknown: Landmarks of which nobody knows whether they are there; they count in no other.
        statuses: How many that are present, and how many that are absent, got each status.
    """

    present: int
    missed: int
    absent: int
    invented: int
    unknown: int
    statuses: Mapping[str, tuple[int, int]]


def measure_accuracy(outcomes: Sequence[Outcome]) -> Accuracy | None:
    """Measure how far off landmarks are; None if none was placed that is there."""
    mm = errors_mm(outcomes)
    if not mm.size:
        return None
    present = sum(outcome.present for outcome in outcomes)
    voxels = np.array([outcome.error_voxels for outcome in outcomes])
    return Accuracy(
        count=len(mm),
        mean_mm=float(mm.mean()),
        median_mm=float(np.median(mm)),
        p95_mm=float(np.percentile(mm, 95)),
        largest_mm=float(mm.max()),
        mean_voxels=float(np.nanmean(voxels)),
        within=tuple(float((mm <= radius).sum() / present) for radius in WITHIN_MM),
    )


def measure_presence(outcomes: Sequence[Outcome]) -> Presence:
    """Count what was missed and what was invented."""
    there = Counter(outcome.status for outcome in outcomes if outcome.present)
    gone = Counter(outcome.status for outcome in outcomes if outcome.known and not outcome.present)
    return Presence(
        present=there.total(),
        missed=there.total() - there["detected"],
        absent=gone.total(),
        invented=gone["detected"],
        unknown=sum(not outcome.known for outcome in outcomes),
        statuses={
            status: (there[status], gone[status])
            for status in ("detected", "low_confidence", "not_found", "out_of_field")
        },
    )


def measure_coverage(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Count the errors that stay within the region they were told with, and all such errors."""
    told = [
        outcome.error_mm <= outcome.region95_mm
        for outcome in outcomes
        if outcome.region95_mm is not None and np.isfinite(outcome.error_mm)
    ]
    return sum(told), len(told)


def errors_mm(outcomes: Sequence[Outcome]) -> np.ndarray:
    """List the errors of landmarks that were placed and are there, in mm."""
    mm = np.array([outcome.error_mm for outcome in outcomes], dtype=np.float64)
    return np.asarray(mm[np.isfinite(mm)])


def group(
    outcomes: Sequence[Outcome], key: Callable[[Outcome], str]
) -> dict[str, tuple[Outcome, ...]]:
    """Split outcomes by scan or landmark, in order of first appearance."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return {name: tuple(members) for name, members in groups.items()}
