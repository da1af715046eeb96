"""Held-out errors -> conformal 95 % regions: for each landmark, the radius around its position.

Errors are divided by what regions grow by in ``app.inference.regions``: regions are wider for scans
that are more uncertain than half of them.

The radius is that of split-conformal prediction (Vovk, Gammerman, Shafer: Algorithmic Learning in a
Random World, 2005): of n errors, the k-th smallest with k = ceil(0.95 (n + 1)). A further error
stays within it with a probability of at least k / (n + 1). That takes 19 errors. Landmarks that
name a group share a radius, as they are alike and the largest of their own few errors would say
little. Any other landmark that has 19 errors gets a radius of its own. The rest share one, from the
errors of all landmarks together. A shared radius holds on average over its landmarks, not for each,
and treats errors of one scan as if they were independent.

Errors of cross-validation come from K models, each on scans that it was not trained on. A radius
from them is cross-conformal (Vovk: Cross-conformal predictors, Annals of Mathematics and Artificial
Intelligence 74, 2015): in practice about 95 % of further errors stay within. Nothing is proven of
regions around the answers of one model that was trained alike on all specimens. As it was trained
on more, its errors are likely to be smaller.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from app.inference import Uncertainty, combine, growth
from app.measurements import MeasurementSpec
from app.model import LandmarkSpec
from app.training.data.folds import Folds, subject_as_known
from app.training.evaluate.digits import decimals_of
from app.training.evaluate.measured import compare_measurements
from app.training.evaluate.metrics import group
from app.training.evaluate.outcomes import Outcome

COVERAGE: Final = 0.95

NO_SCALE_MM: Final = 0.001
"""Instead of a length of 0, which would have no meaning as a scale."""

MARGIN_PERCENTILE: Final = 5.0
"""Of the distances from the border, of landmarks that regions were calibrated on: nearer to it, too
few are known. In half spines, whose borders cut through what a landmark is known by, two thirds of
the errors stayed within the regions of whole ones; of those beyond the margin, nine in ten."""

ErrorsOf = Literal["landmark", "group", "all"]
"""Whose errors a region is based on: the landmark's own, its group's, or those of all landmarks."""


@dataclass(frozen=True, slots=True)
class Region:
    """A radius, and what it is based on.

    Attributes:
        radius_mm: In mm.
        errors: Number of errors that it is based on.
        coverage: Probability that a further error stays within.
        of: Whose errors they are.
    """

    radius_mm: float
    errors: int
    coverage: float
    of: ErrorsOf


def conformal_region(errors: np.ndarray, of: ErrorsOf) -> Region | None:
    """Compute the radius that 95 % of further errors stay within; None if errors are too few."""
    rank = math.ceil(COVERAGE * (len(errors) + 1))
    if rank > len(errors):
        return None
    radius = float(np.sort(errors)[rank - 1])
    return Region(radius, len(errors), rank / (len(errors) + 1), of)


def usual_uncertainty(outcomes: Sequence[Outcome]) -> Uncertainty:
    """Compute the uncertainty that half of the scans stay below.

    Returns:
        Rounded, as it is written: regions are calibrated in units of what they grow by.
    """
    per_scan = _uncertainties(outcomes).values()
    return Uncertainty(
        _median(one.from_shape_mm for one in per_scan), _median(one.spread_mm for one in per_scan)
    )


def _median(lengths_mm: Iterable[float | None]) -> float | None:
    known = [mm for mm in lengths_mm if mm is not None]
    if not known:
        return None
    median = float(np.median(known))
    return round(median, decimals_of(median)) or NO_SCALE_MM


def growths(outcomes: Sequence[Outcome], usual: Uncertainty) -> dict[str, float]:
    """Compute by how much the regions of each scan grow with its uncertainty."""
    return {scan: growth(one, usual) for scan, one in _uncertainties(outcomes).items()}


def in_units_of_growth(outcomes: Sequence[Outcome], usual: Uncertainty) -> list[Outcome]:
    """Divide errors by what regions grow by: what all else here works on."""
    growth_of = growths(outcomes, usual)
    return [replace(one, error_mm=one.error_mm / growth_of[one.scan]) for one in outcomes]


def _uncertainties(outcomes: Sequence[Outcome]) -> dict[str, Uncertainty]:
    return {
        scan: combine((one.status, one.from_shape_mm, one.spread_mm) for one in some)
        for scan, some in group(outcomes, lambda outcome: outcome.scan).items()
    }


def calibrate_regions(
    outcomes: Sequence[Outcome], specs: Sequence[LandmarkSpec]
) -> dict[str, Region] | None:
    """Compute the region of each landmark.

    Returns:
        By name; None if the errors of all landmarks together are too few.
    """
    everywhere = conformal_region(detected_errors(outcomes), "all")
    if everywhere is None:
        return None
    groups = {spec.name: spec.group for spec in specs}
    by_group = group(outcomes, lambda outcome: groups[outcome.landmark])
    by_name = group(outcomes, lambda outcome: outcome.landmark)
    regions = {}
    for name, label in groups.items():
        mine = by_group.get(label, ()) if label else by_name.get(name, ())
        region = conformal_region(detected_errors(mine), "group" if label else "landmark")
        regions[name] = region or everywhere
    return regions


def calibrate_intervals(
    specs: Sequence[MeasurementSpec],
    outcomes: Sequence[Outcome],
    regions: Mapping[str, Region],
    usual: Uncertainty,
) -> float | None:
    """Compute by how much the intervals of measurements must be wider than errors propagate.

    Errors of landmarks are not independent, and not alike in all directions.

    Args:
        specs: The measurements.
        outcomes: Of whole scans, errors in mm.
        regions: Of each landmark.
        usual: Uncertainty from which on they grow.

    Returns:
        One factor for all measurements, whatever their units: it holds on average over them. None
        if they are too few.
    """
    plain = [spec.model_copy(update={"interval_scale": 1.0}) for spec in specs]
    growth_of = growths(outcomes, usual)
    answered = [
        replace(one, region95_mm=growth_of[one.scan] * regions[one.landmark].radius_mm)
        for one in outcomes
    ]
    compared = compare_measurements(plain, answered)
    ratios = [one.error / one.half_width for one in compared if one.half_width]
    factor = conformal_region(np.array(ratios), "all")
    return None if factor is None else factor.radius_mm


def detected_errors(outcomes: Sequence[Outcome]) -> np.ndarray:
    """List the errors of detected landmarks, in mm: only these are answered with a region."""
    mm = [outcome.error_mm for outcome in outcomes if has_error(outcome)]
    return np.array(mm, dtype=np.float64)


def has_error(outcome: Outcome) -> bool:
    """Return whether a landmark is answered with a region, and it is known how far off it is."""
    return outcome.status == "detected" and math.isfinite(outcome.error_mm)


def region_margin(outcomes: Sequence[Outcome], radius_mm: float) -> float:
    """Compute how far from the scan's border a landmark must lie for its region to hold.

    Args:
        outcomes: That regions were calibrated on.
        radius_mm: Within which the network votes: borders further away cut nothing off.

    Returns:
        In mm; 0 for a network without a radius.
    """
    inside = [one.inside_mm for one in outcomes if has_error(one)]
    margin = max(0.0, float(np.percentile(inside, MARGIN_PERCENTILE)))
    return min(margin, radius_mm) if math.isfinite(radius_mm) else 0.0


def leave_one_out(
    outcomes: Sequence[Outcome],
    specs: Sequence[LandmarkSpec],
    folds: Folds | None = None,
) -> dict[str, float]:
    """Measure which share of each scan's errors lies within the regions of other subjects' scans.

    Returns:
        The share by scan; without scans of which nothing is detected, or whose others have too few
        errors.
    """
    by_scan = group(list(filter(has_error, outcomes)), lambda outcome: outcome.scan)
    subjects = {scan: subject_as_known(scan, folds) for scan in by_scan}
    shares = {}
    for scan, mine in by_scan.items():
        others = [
            one for other in by_scan if subjects[other] != subjects[scan] for one in by_scan[other]
        ]
        regions = calibrate_regions(others, specs)
        if regions is not None:
            shares[scan] = share_within(mine, regions)
    return shares


def share_within(outcomes: Sequence[Outcome], regions: Mapping[str, Region]) -> float:
    """Measure which share of errors, of one at least, lies within given regions."""
    errors = filter(has_error, outcomes)
    return float(np.mean([one.error_mm <= regions[one.landmark].radius_mm for one in errors]))
