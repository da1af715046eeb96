"""Outcomes of cross-validation -> how much the mean error varies over subjects and over folds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from app.training.evaluate.digits import format_number
from app.training.evaluate.metrics import errors_mm, group
from app.training.evaluate.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Spread:
    """How much the mean error varies.

    Attributes:
        subjects: Number of subjects with errors, each of which several scans may show.
        mean_mm: Mean of the subjects' mean errors.
        subjects_mm: Standard deviation of these.
        low_mm: Lower bound of the 95 % interval of the mean, by Student's t over subjects.
        high_mm: Its upper bound.
        folds: Number of folds.
        folds_mm: Standard deviation of the folds' mean errors; NaN of a single one.
    """

    subjects: int
    mean_mm: float
    subjects_mm: float
    low_mm: float
    high_mm: float
    folds: int
    folds_mm: float


def measure_spread(
    outcomes: Sequence[Outcome], subjects: Mapping[str, str], folds: Mapping[str, str]
) -> Spread | None:
    """Measure how much the mean error varies over subjects and folds.

    Scans of one subject are no independent draws.

    Returns:
        The spread; None if there are errors of fewer than two subjects.
    """
    means = mean_errors(outcomes, subjects)
    if len(means) < 2:
        return None
    low, high = mean_interval(means)
    by_fold = mean_errors(outcomes, folds)
    return Spread(
        subjects=len(means),
        mean_mm=float(means.mean()),
        subjects_mm=float(means.std(ddof=1)),
        low_mm=low,
        high_mm=high,
        folds=len(by_fold),
        folds_mm=float(by_fold.std(ddof=1)) if len(by_fold) > 1 else float("nan"),
    )


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the 95 % interval of the mean of values, one for each independent case.

    It is Student's, which is right for few cases, too, where resampling them gives intervals that
    are too narrow: of five, ones that hold 81 %. A single case has no bounds.
    """
    count = len(values)
    if count < 2:
        return -np.inf, np.inf
    mean = float(values.mean())
    half = float(t.ppf(0.975, count - 1)) * float(values.std(ddof=1)) / count**0.5
    return mean - half, mean + half


def mean_errors(outcomes: Sequence[Outcome], groups: Mapping[str, str]) -> np.ndarray:
    """Average the errors of each group of scans, in mm; groups without errors are left out."""
    grouped = group(outcomes, lambda outcome: groups[outcome.scan])
    errors = [errors_mm(members) for members in grouped.values()]
    return np.array([mm.mean() for mm in errors if mm.size], dtype=np.float64)


def describe_spread(spread: Spread | None) -> str:
    """Describe in a sentence how much the mean error varies."""
    if spread is None:
        return "Too few subjects have errors to say how much the mean error varies."
    folds = "" if np.isnan(spread.folds_mm) else f", {format_number(spread.folds_mm)} mm over folds"
    return (
        f"Mean of {spread.subjects} subjects' mean errors: {format_number(spread.mean_mm)} mm, "
        f"95 % interval {format_number(spread.low_mm)} to {format_number(spread.high_mm)} mm "
        "(Student's t over subjects); standard deviation "
        f"{format_number(spread.subjects_mm)} mm over subjects{folds}."
    )
