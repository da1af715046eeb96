"""Outcomes of cross-validation -> how much the mean error varies over subjects and over folds."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import t

from app.training.evaluate.digits import format_number
from app.training.evaluate.metrics import errors_mm, group
from app.training.evaluate.outcomes import Outcome


def describe_spread(
    outcomes: Sequence[Outcome], subjects: Mapping[str, str], folds: Mapping[str, str]
) -> str:
    """Describe in a sentence how much the mean error varies over subjects and folds.

    Scans of one subject are no independent draws.

    Args:
        outcomes: Of all scans.
        subjects: The subject that each scan shows.
        folds: The fold of each scan.
    """
    means, of_folds = mean_errors(outcomes, subjects), mean_errors(outcomes, folds)
    if len(means) < 2:
        return "Too few subjects have errors to say how much the mean error varies."
    low, high = map(format_number, mean_interval(means))
    over = f", {format_number(of_folds.std(ddof=1))} mm over folds" if len(of_folds) > 1 else ""
    return (
        f"Mean of {len(means)} subjects' mean errors: {format_number(means.mean())} mm, "
        f"95 % interval {low} to {high} mm (Student's t over subjects); standard deviation "
        f"{format_number(means.std(ddof=1))} mm over subjects{over}."
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
