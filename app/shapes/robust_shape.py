"""The median constellation of specimens that may be wrong, and each landmark's distance from it.

Unlike the mean shape that a model keeps, this one is made to find errors in data: it is a median
over specimens, and each is fitted to it with robust weights (Geman and McClure), so that a few
misplaced landmarks have no influence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from app.geometry import Points, PointSet
from app.shapes.similarity import MIN_LANDMARKS, Similarity, drop_collapsed, fit_similarity
from app.shapes.symmetry import find_partners

MAX_CANDIDATES: Final = 12
"""Specimens tried as the initial shape; most are right, so the best one is."""

FIT_ROUNDS: Final = 12
WIDTHS: Final = (16.0, 4.0)
"""Squared scale of the weight, in median squared residuals, in the first and the last round. Much
narrower, and a fit locks onto the few landmarks that it happens to match."""

NO_WIDTH: Final = 1e-30
"""Added to it, mm², so that no division is by zero: less than matters in the smallest cell."""

MEDIAN_ROUNDS: Final = 4

MAX_SIGMAS: Final = 5.0
"""Robust standard deviations above the median from which a landmark is misplaced."""

MIN_SIGMA: Final = 0.43
"""Robust standard deviation of the length of a Gaussian 3D error over its median: a lower bound."""

MIN_SPREAD: Final = 0.003
"""In diagonals of the shape: landmarks closer than this to their position are never misplaced."""

MAX_CONSISTENT_RESIDUAL: Final = 0.08
"""Upper quartile of the residuals, in diagonals, up to which the specimens share a constellation:
0.01 in skulls. A quartile, as every fit matches a few landmarks."""

FIT_PARAMETERS: Final = 7
"""Degrees of freedom of a similarity, which reduce the residuals even of random points."""

PointSets = Float64[np.ndarray, "specimens landmarks 3"]
Residuals = Float64[np.ndarray, "specimens landmarks"]


@dataclass(frozen=True)
class RobustShape:
    """The median constellation of several specimens.

    Attributes:
        points: Positions in mm, in the frame and size of one of the specimens; NaN where unknown.
        fits: Maps each specimen's points to it.
        usable: Which specimens share enough landmarks with it to be fitted.
        residual_mm: Distance of each landmark from its position in the shape, in mm of its own
            specimen; NaN where there is none.
        limit_mm: Distance from which a landmark is misplaced, by landmark.
        consistent: Whether the specimens have a constellation in common.
    """

    points: Points
    fits: Similarity
    usable: Bool[np.ndarray, " specimens"]
    residual_mm: Residuals
    limit_mm: Float64[np.ndarray, " landmarks"]
    consistent: bool

    @cached_property
    def partners(self) -> Int64[np.ndarray, " landmarks"] | None:
        """Each landmark's mirror image, as ``find_partners`` has it."""
        return find_partners(self.points)


def estimate_robust_shape(point_sets: Sequence[PointSet]) -> RobustShape | None:
    """Estimate the median constellation.

    Args:
        point_sets: Landmarks of each specimen in one order, in mm; NaN where there is none.

    Returns:
        The shape; None if fewer than four specimens share four landmarks.
    """
    sets = drop_collapsed(np.stack(point_sets) if len(point_sets) else np.zeros((0, 0, 3)))
    known = np.asarray(np.isfinite(sets).all(axis=2))
    if (known.sum(axis=1) >= MIN_LANDMARKS).sum() < MIN_LANDMARKS:
        return None
    points = _initial_shape(sets, known)
    for _ in range(MEDIAN_ROUNDS):
        fits, usable = fit_to(sets, points)
        if usable.sum() < MIN_LANDMARKS:
            return None
        points = _median(np.where(usable[:, None, None], fits.apply(sets), np.nan))
    fits, usable = fit_to(sets, points)
    residual = residuals(sets, points, fits)
    residual[~usable] = np.nan
    diagonal = float(np.linalg.norm(np.ptp(points[np.isfinite(points).all(axis=1)], axis=0)))
    numbers = 3.0 * np.isfinite(residual).sum(axis=1, keepdims=True)
    freedom = np.maximum(numbers - FIT_PARAMETERS, 1.0)
    relative = residual * fits.scale[:, None] / diagonal * np.sqrt(numbers / freedom)
    return RobustShape(
        points=points,
        fits=fits,
        usable=usable,
        residual_mm=residual,
        limit_mm=_limits(residual, MIN_SPREAD * diagonal),
        consistent=float(np.nanpercentile(relative, 75)) <= MAX_CONSISTENT_RESIDUAL,
    )


def fit_to(sets: PointSets, shape: Points) -> tuple[Similarity, Bool[np.ndarray, " specimens"]]:
    """Fit each specimen to a shape with robust weights; NaN is where a landmark is unknown.

    Returns:
        The fits, and which specimens share enough landmarks with the shape to be fitted.
    """
    known = np.isfinite(sets).all(axis=2) & np.isfinite(shape).all(axis=1)
    usable = known.sum(axis=1) >= MIN_LANDMARKS
    source, target = np.where(known[..., None], sets, 0.0), np.nan_to_num(shape)
    # A specimen that cannot be fitted gets some weight too, so that no division is by zero.
    weight = np.where(usable[:, None], known, 1.0)
    fits = fit_similarity(source, np.broadcast_to(target, source.shape), weight)
    for share in np.linspace(0, 1, FIT_ROUNDS):
        square = ((fits.apply(source) - target) ** 2).sum(axis=2)
        median = np.nanmedian(np.where(known | ~usable[:, None], square, np.nan), axis=1)
        # Wide at first, as one distant landmark turns the whole first fit.
        width = WIDTHS[1] ** share * WIDTHS[0] ** (1 - share) * median + NO_WIDTH
        robust = weight / (1 + square / width[:, None]) ** 2
        fits = fit_similarity(source, np.broadcast_to(target, source.shape), robust)
    return fits, usable


def residuals(sets: PointSets, shape: Points, fits: Similarity) -> Residuals:
    """Measure the distance of each landmark from the fitted shape, in mm of its specimen."""
    distance = np.linalg.norm(fits.apply(sets) - shape, axis=2)
    return np.asarray(distance / np.maximum(fits.scale, 1e-9)[:, None])


def _initial_shape(sets: PointSets, known: Bool[np.ndarray, "specimens landmarks"]) -> Points:
    """Take the specimen that the others fit best, among those with the most landmarks."""
    order = np.argsort(-known.sum(axis=1), kind="stable")[:MAX_CANDIDATES]

    def misfit(candidate: int) -> float:
        fits, usable = fit_to(sets, sets[candidate])
        distance = residuals(sets, sets[candidate], fits)[usable]
        return float(np.nanmedian(distance)) if np.isfinite(distance).any() else np.inf

    # All others would fit a specimen of four landmarks well, which would prove little.
    counts = known[order].sum(axis=1)
    complete = order[counts >= 0.9 * counts[0]]
    return np.asarray(sets[min(complete.tolist(), key=misfit)])


def _median(fitted: PointSets) -> Points:
    """Take the median position of every landmark, along each axis; NaN where it is unknown."""
    shape = np.full(fitted.shape[1:], np.nan)
    observed = np.isfinite(fitted).all(axis=2).any(axis=0)
    shape[observed] = np.nanmedian(fitted[:, observed], axis=0)
    return shape


def _limits(residual: Residuals, min_mm: float) -> Float64[np.ndarray, " landmarks"]:
    """Choose how far each landmark may be from its position: some vary more than others.

    A landmark's own spread is its median residual. How residuals scatter around it is estimated
    from all landmarks together, as a few specimens say too little about each.
    """
    observed = np.isfinite(residual).any(axis=0)
    spread = np.full(residual.shape[1], np.inf)
    spread[observed] = np.nanmedian(residual[:, observed], axis=0)
    pooled = float(np.nanmedian(residual))
    spread = np.maximum(spread, max(0.75 * pooled, min_mm))
    ratio = residual / spread
    ratio = ratio[np.isfinite(ratio)]
    median = float(np.median(ratio))
    sigma = 1.4826 * float(np.median(np.abs(ratio - median)))
    return np.asarray(spread * (median + MAX_SIGMAS * max(sigma, MIN_SIGMA)))
