"""Outcomes of several models -> how much the mean error varies, over specimens and over folds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.training.evaluate.metrics import errors_mm, group
from app.training.evaluate.outcomes import Outcome

RESAMPLES: Final = 10_000
"""Draws of the bootstrap; its bounds are then good to about a hundredth of their distance."""

SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """How much the mean error varies.

    Attributes:
        specimens: How many there are that any landmark was placed of.
        mean_mm: Mean of the specimens' mean errors.
        specimens_mm: Standard deviation of these.
        low_mm: Lower bound of the 95 % interval of the mean: bootstrap over specimens, percentiles
            (Efron, Tibshirani: An Introduction to the Bootstrap, 1993).
        high_mm: Its upper bound.
        folds: How many there are.
        folds_mm: Standard deviation of the folds' mean errors; NaN of a single one.
    """

    specimens: int
    mean_mm: float
    specimens_mm: float
    low_mm: float
    high_mm: float
    folds: int
    folds_mm: float


def measure_spread(
    outcomes: Sequence[Outcome], subjects: Mapping[str, str], folds: Mapping[str, str]
) -> Spread | None:
    """Measure how much the mean error varies.

    Args:
        outcomes: Of all folds.
        subjects: The specimen that each scan shows: scans of one are no independent draws.
        folds: The fold of each scan.

    Returns:
        The spread; None if landmarks were placed in fewer than two specimens.
    """
    means = means_by(outcomes, subjects)
    if len(means) < 2:
        return None
    draws = np.random.default_rng(SEED).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.percentile(means[draws].mean(axis=1), [2.5, 97.5])
    by_fold = means_by(outcomes, folds)
    return Spread(
        specimens=len(means),
        mean_mm=float(means.mean()),
        specimens_mm=float(means.std(ddof=1)),
        low_mm=float(low),
        high_mm=float(high),
        folds=len(by_fold),
        folds_mm=float(by_fold.std(ddof=1)) if len(by_fold) > 1 else float("nan"),
    )


def means_by(outcomes: Sequence[Outcome], names: Mapping[str, str]) -> np.ndarray:
    """Average the errors of scans of one name, in mm; names of which none was placed are left out.

    Args:
        outcomes: Of several scans.
        names: Of each scan, such as its fold.

    Returns:
        The mean errors.
    """
    groups = group(outcomes, lambda outcome: names[outcome.scan])
    errors = [errors_mm(members) for members in groups.values()]
    return np.array([mm.mean() for mm in errors if mm.size], dtype=np.float64)


def say_spread(spread: Spread | None) -> str:
    """Say how much the mean error varies, in a sentence."""
    if spread is None:
        return "Landmarks were placed in too few specimens to say how much the error varies."
    folds = "" if np.isnan(spread.folds_mm) else f", {spread.folds_mm:.3f} mm over folds"
    return (
        f"Mean of {spread.specimens} specimens' mean errors: {spread.mean_mm:.3f} mm, 95 % "
        f"interval {spread.low_mm:.3f} to {spread.high_mm:.3f} mm (bootstrap over specimens); "
        f"standard deviation {spread.specimens_mm:.3f} mm over specimens{folds}."
    )
