"""Held-out errors -> the radius that 95 % of further errors stay within, for each landmark.

The radius is that of split-conformal prediction (Vovk, Gammerman, Shafer: Algorithmic Learning in a
Random World, 2005): of n errors, the k-th smallest with k = ceil(0.95 (n + 1)), which a further
error stays within with a chance of at least k / (n + 1). That takes 19 errors. A landmark that has
them gets a radius of its own. The others share one, of the errors of all landmarks together: it
holds on average over landmarks, not for each, and counts errors of one scan as if they said as much
as errors of different scans.

Errors of cross-validation come from K models, each on scans that it never saw. A radius taken from
them is cross-conformal (Vovk: Cross-conformal predictors, Annals of Mathematics and Artificial
Intelligence 74, 2015): in practice about 95 % of further errors stay within. Proven is less, and of
regions around the answers of those K models: with n specimens at least 1 - 2 alpha -
min(2 (1 - 1/K) / (n/K + 1), (1 - K/n) / (K + 1)), alpha being 5 %, so 90 % where K is n (Barber,
Candes, Ramdas, Tibshirani: Predictive inference with the jackknife+, Annals of Statistics 49, 2021,
theorem 4). The regions here lie around the answers of one model, which was trained alike on all
specimens; of these it is proven only as far as that model answers as the others do. As it has
learned from more, its errors are likelier to be smaller.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.training.evaluate.metrics import group
from app.training.evaluate.outcomes import Outcome

COVERAGE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Region:
    """A radius, and what it rests on.

    Attributes:
        radius_mm: In mm.
        errors: How many errors it was taken from.
        promise: Chance that a further error stays within.
        own: Whether the errors are the landmark's own.
    """

    radius_mm: float
    errors: int
    promise: float
    own: bool


def conformal_region(errors: np.ndarray, *, own: bool) -> Region | None:
    """Take the radius that a further error stays within with a chance of 95 %; None if too few."""
    rank = math.ceil(COVERAGE * (len(errors) + 1))
    if rank > len(errors):
        return None
    radius = float(np.sort(errors)[rank - 1])
    return Region(radius, len(errors), rank / (len(errors) + 1), own)


def calibrate_regions(
    outcomes: Sequence[Outcome], names: Sequence[str]
) -> dict[str, Region] | None:
    """Take a radius for each landmark.

    Args:
        outcomes: Of scans that no weight was trained on.
        names: Of the model's landmarks.

    Returns:
        The landmark's own region, or the shared one; None if even all errors together are too few.
    """
    shared = conformal_region(sure_errors(outcomes), own=False)
    if shared is None:
        return None
    members = group(outcomes, lambda outcome: outcome.landmark)
    own = {name: conformal_region(sure_errors(members.get(name, ())), own=True) for name in names}
    return {name: region or shared for name, region in own.items()}


def sure_errors(outcomes: Sequence[Outcome]) -> np.ndarray:
    """List the errors of detected landmarks, in mm: only these are told with a region."""
    mm = [outcome.error_mm for outcome in outcomes if outcome.status == "detected"]
    errors = np.array(mm, dtype=np.float64)
    return np.asarray(errors[np.isfinite(errors)])


def promise_of(errors: int) -> float:
    """Say how much the largest of so many errors covers: the most that they can promise."""
    return errors / (errors + 1)


def proven_of(specimens: int, folds: int) -> float:
    """Say what is proven of regions around the answers of the models of folds; see above.

    Args:
        specimens: How many there are.
        folds: How many folds they are in.

    Returns:
        The least chance that a further error stays within.
    """
    size = specimens / folds
    loss = min(2 * (1 - 1 / folds) / (size + 1), (1 - 1 / size) / (folds + 1))
    return 1 - 2 * (1 - COVERAGE) - loss


def left_out(outcomes: Sequence[Outcome], names: Sequence[str]) -> dict[str, float]:
    """Measure which share of each scan's errors the regions of the other scans hold.

    Returns:
        The share by scan; without scans whose others are too few.
    """
    shares = {}
    for scan, mine in group(outcomes, lambda outcome: outcome.scan).items():
        others = [outcome for outcome in outcomes if outcome.scan != scan]
        regions = calibrate_regions(others, names)
        told = [outcome for outcome in mine if len(sure_errors([outcome]))]
        if regions is not None and told:
            shares[scan] = _share_within(told, regions)
    return shares


def _share_within(outcomes: Sequence[Outcome], regions: Mapping[str, Region]) -> float:
    inside = [outcome.error_mm <= regions[outcome.landmark].radius_mm for outcome in outcomes]
    return float(np.mean(inside))
