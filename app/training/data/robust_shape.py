"""constellations -> the typical one, and how far each landmark of each specimen is from it.

Unlike the mean shape that a model keeps, this one is made to judge data that may be wrong: it is a
median over specimens, and each is fitted to it by weights (Geman and McClure) under which a few
landmarks in wrong places have no say.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from app.geometry import Points
from app.voting import MIN_LANDMARKS, Similarity, fit_similarity

CANDIDATES: Final = 12
"""Specimens tried as the first guess of the typical shape; most are sound, so the best one is."""

FIT_ROUNDS: Final = 12
WIDTHS: Final = (16.0, 4.0)
"""Squared scale of the weight, in median squared residuals, in the first and the last round. Much
narrower, and a fit holds on to the few landmarks that it happens to meet."""

MEDIAN_ROUNDS: Final = 4

SIGMAS: Final = 5.0
"""Robust standard deviations above the median from which a landmark is out of place."""

GAUSSIAN_SIGMA: Final = 0.43
"""Robust standard deviation of the length of a Gaussian 3D error over its median; least assumed."""

LEAST_SPREAD: Final = 0.003
"""Of the shape's diagonal: landmarks as near as this to the typical ones are never out of place."""

LOOSE: Final = 0.08
"""Upper quartile of the residuals, in diagonals, from which landmarks form no constellation but lie
anyhow: 0.01 in skulls. A quartile, as each fit meets a few landmarks whatever they are."""

FIT_FREEDOM: Final = 7
"""Numbers that a similarity can choose, so that even landmarks that lie anyhow lie nearer to it."""

Cloud = Float64[np.ndarray, "specimens landmarks 3"]
Residuals = Float64[np.ndarray, "specimens landmarks"]


@dataclass(frozen=True, slots=True)
class Typical:
    """The typical constellation of several specimens.

    Attributes:
        shape: Places in mm, in the frame and size of one of the specimens; NaN where unknown.
        fits: Maps each specimen's points to it.
        usable: Which specimens share enough landmarks with it to be fitted.
        residual_mm: Distance of each landmark from its typical place, in mm of its own specimen;
            NaN where it has none.
        limit_mm: Distance from which a landmark is out of place, by landmark.
        loose: Whether the specimens have no constellation in common.
    """

    shape: Points
    fits: Similarity
    usable: Bool[np.ndarray, " specimens"]
    residual_mm: Residuals
    limit_mm: Float64[np.ndarray, " landmarks"]
    loose: bool


def find_typical(point_sets: Sequence[Points]) -> Typical | None:
    """Find the typical constellation.

    Args:
        point_sets: Landmarks of each specimen in one order, in mm; NaN where there is none.

    Returns:
        The constellation; None if fewer than four specimens share four landmarks.
    """
    cloud = np.stack(point_sets) if len(point_sets) else np.zeros((0, 0, 3))
    known = np.asarray(np.isfinite(cloud).all(axis=2))
    if (known.sum(axis=1) >= MIN_LANDMARKS).sum() < MIN_LANDMARKS:
        return None
    shape = _first_guess(cloud, known)
    for _ in range(MEDIAN_ROUNDS):
        fits, usable = fit_to(cloud, shape)
        if usable.sum() < MIN_LANDMARKS:
            return None
        moved = np.where(usable[:, None, None], fits.apply(cloud), np.nan)
        shape = _median(moved)
    fits, usable = fit_to(cloud, shape)
    residual = residuals(cloud, shape, fits)
    residual[~usable] = np.nan
    diagonal = float(np.linalg.norm(np.ptp(shape[np.isfinite(shape).all(axis=1)], axis=0)))
    numbers = 3.0 * np.isfinite(residual).sum(axis=1, keepdims=True)
    freedom = np.maximum(numbers - FIT_FREEDOM, 1.0)
    relative = residual * fits.scale[:, None] / diagonal * np.sqrt(numbers / freedom)
    return Typical(
        shape=shape,
        fits=fits,
        usable=usable,
        residual_mm=residual,
        limit_mm=_limits(residual, LEAST_SPREAD * diagonal),
        loose=float(np.nanpercentile(relative, 75)) > LOOSE,
    )


def fit_to(cloud: Cloud, shape: Points) -> tuple[Similarity, Bool[np.ndarray, " specimens"]]:
    """Fit each specimen to a shape, robustly; says which share enough landmarks with it."""
    known = np.isfinite(cloud).all(axis=2) & np.isfinite(shape).all(axis=1)
    usable = known.sum(axis=1) >= MIN_LANDMARKS
    source, target = np.where(known[..., None], cloud, 0.0), np.nan_to_num(shape)
    # What cannot be fitted gets some weight all the same, so that no division is by zero.
    weight = np.where(usable[:, None], known, 1.0)
    fits = fit_similarity(source, np.broadcast_to(target, source.shape), weight)
    for share in np.linspace(0, 1, FIT_ROUNDS):
        square = ((fits.apply(source) - target) ** 2).sum(axis=2)
        median = np.nanmedian(np.where(known | ~usable[:, None], square, np.nan), axis=1)
        # Wide at first, as one landmark far away turns the whole first fit.
        width = WIDTHS[1] ** share * WIDTHS[0] ** (1 - share) * median + 1e-12
        robust = weight / (1 + square / width[:, None]) ** 2
        fits = fit_similarity(source, np.broadcast_to(target, source.shape), robust)
    return fits, usable


def residuals(cloud: Cloud, shape: Points, fits: Similarity) -> Residuals:
    """Measure how far each landmark lies from where the shape has it, in mm of its specimen."""
    apart = np.linalg.norm(fits.apply(cloud) - shape, axis=2)
    return np.asarray(apart / np.maximum(fits.scale, 1e-9)[:, None])


def _first_guess(cloud: Cloud, known: Bool[np.ndarray, "specimens landmarks"]) -> Points:
    """Take the specimen that the others fit best, among those that know most landmarks."""
    order = np.argsort(-known.sum(axis=1), kind="stable")[:CANDIDATES]

    def misfit(candidate: int) -> float:
        fits, usable = fit_to(cloud, cloud[candidate])
        apart = residuals(cloud, cloud[candidate], fits)[usable]
        return float(np.nanmedian(apart)) if np.isfinite(apart).any() else np.inf

    # To a specimen of four landmarks all others would fit well, and it would say little.
    most = known[order].sum(axis=1)
    good = order[most >= 0.9 * most[0]]
    return np.asarray(cloud[min(good.tolist(), key=misfit)])


def _median(moved: Cloud) -> Points:
    """Take the median place of every landmark, along each axis; NaN where nobody knows it."""
    shape = np.full(moved.shape[1:], np.nan)
    seen = np.isfinite(moved).all(axis=2).any(axis=0)
    shape[seen] = np.nanmedian(moved[:, seen], axis=0)
    return shape


def _limits(residual: Residuals, least_mm: float) -> Float64[np.ndarray, " landmarks"]:
    """Find how far each landmark may be off: some vary more than others.

    A landmark's own spread is its median distance; how distances scatter around it is counted over
    all landmarks together, as a few specimens say too little about each.
    """
    seen = np.isfinite(residual).any(axis=0)
    spread = np.full(residual.shape[1], np.inf)
    spread[seen] = np.nanmedian(residual[:, seen], axis=0)
    pooled = float(np.nanmedian(residual))
    spread = np.maximum(spread, max(0.75 * pooled, least_mm))
    ratio = residual / spread
    ratio = ratio[np.isfinite(ratio)]
    middle = float(np.median(ratio))
    sigma = 1.4826 * float(np.median(np.abs(ratio - middle)))
    return np.asarray(spread * (middle + SIGMAS * max(sigma, GAUSSIAN_SIGMA)))
