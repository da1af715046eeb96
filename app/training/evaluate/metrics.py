"""Outcomes -> metrics: errors, presence, and coverage of 95 % regions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, get_args

import numpy as np

from app.io import Status
from app.training.evaluate.outcomes import Outcome

T = TypeVar("T")

WITHIN_MM: Final[tuple[float, ...]] = (0.25, 0.5, 1.0, 2.0, 2.5, 3.0, 4.0)
"""Radii of the success detection rates: from 2 mm on those of the field's challenges."""


@dataclass(frozen=True, slots=True)
class Presence:
    """How well a model detects whether a landmark is present.

    Attributes:
        present: Landmarks that are present.
        missed: Those of them that are not detected: false negatives.
        absent: Landmarks that are absent.
        invented: Those of them that are detected: false positives.
        unknown: Landmarks of unknown presence, which count in none of the others.
        statuses: Numbers of present and of absent landmarks, by status.
    """

    present: int
    missed: int
    absent: int
    invented: int
    unknown: int
    statuses: Mapping[str, tuple[int, int]]


def measure_presence(outcomes: Sequence[Outcome]) -> Presence:
    """Count false negatives and false positives."""
    present = Counter(outcome.status for outcome in outcomes if outcome.present)
    absent = Counter(one.status for one in outcomes if one.known and not one.present)
    return Presence(
        present=present.total(),
        missed=present.total() - present["detected"],
        absent=absent.total(),
        invented=absent["detected"],
        unknown=sum(not outcome.known for outcome in outcomes),
        statuses={status: (present[status], absent[status]) for status in get_args(Status)},
    )


def measure_coverage(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Count the errors within their 95 % region, and all errors that have one."""
    within = [
        outcome.error_mm <= outcome.region95_mm
        for outcome in outcomes
        if outcome.region95_mm is not None and np.isfinite(outcome.error_mm)
    ]
    return sum(within), len(within)


def errors_mm(outcomes: Sequence[Outcome]) -> np.ndarray:
    """List the errors of present landmarks that have a position in the answer, in mm."""
    mm = np.array([outcome.error_mm for outcome in outcomes], dtype=np.float64)
    return np.asarray(mm[np.isfinite(mm)])


def group(items: Sequence[T], key: Callable[[T], str]) -> dict[str, tuple[T, ...]]:
    """Group outcomes, say, by a key such as the scan or landmark, in order of first appearance."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return {name: tuple(members) for name, members in groups.items()}
