"""Modes -> the mode of every landmark that agrees with the mean shape of them all.

A network that sees a neighbourhood confuses look-alikes: left for right, tooth for tooth. The
constellation of all landmarks does not. The mean shape is fitted to the modes by a robust
similarity (rotation, translation, bounded scale, no reflection), and each landmark takes the mode
nearest to the fit. The shape selects modes and flags landmarks; it never moves a point.

The fit starts from the strongest modes of all landmarks; unless nearly all agree with that, from
similarities of three landmarks each (RANSAC), drawn with a fixed seed. It is refined by iteratively
reweighted least squares with the Geman-McClure weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64

from app.geometry import Affine, Points, transform
from app.model import Shape
from app.shapes import MIN_LANDMARKS, SCALE_BOUNDS
from app.voting.cpu import constellation as cpu_constellation

SAMPLES: Final = 1024
"""Triples drawn. With a third of the modes right, 1 in 27 triples is: some 20 of the kept half."""

FEW: Final = 10
"""Of no more landmarks than these, all triples count: where the outermost ones are wrong, the
larger half of the triangles may hold none that is right."""

FINALISTS: Final = 8
"""Best triples that are refined; the best refined one wins."""

ANNEALING: Final = (4.0, 3.0, 2.0, 1.5, 1.0, 1.0, 1.0, 1.0)
"""Width of the robust weight in each refinement step, in tolerances: wide first, as a triple's fit
is off far away from it."""

MIN_RELATIVE_STRENGTH: Final = 0.1
"""A mode with less than this share of its landmark's strongest one takes no part."""

MIN_RIVAL_MASS: Final = 0.4
"""A rival with a smaller share of the mass of what it rivals is none. Of 40 spines that no network
had seen, three were taken for one vertebra further up or down: their rivals had 0.46 to 1.1. With
better networks one still was, and its rival had 0.97."""

MIN_RIVAL_COUNT: Final = 0.5
"""A rival of fewer landmarks, over those of what it rivals, is none either."""

MIN_AGREEMENT: Final = 0.5
"""Least share of the strength of all landmarks that the scan should show by a fit which must lie in
modes near it for it to count as one. Of half a subject, a network takes something else for most of
those that were cut away: counted, these hid the fit of what is there."""

CLEAR_SCORE: Final = 0.6
"""With this share of all strength in its score, the fit to all strongest modes needs no rival. That
of a whole subject has 0.64 or more, and is the one that triples lead to."""

_ABSENT_MM: Final = 1e6
"""Coordinate of a mode that does not exist, in mm: finite, and far from everything."""


Shows: TypeAlias = Callable[[Points], Bool[np.ndarray, "*n"]]


def _show_all(points_mm: Points) -> Bool[np.ndarray, "*n"]:
    return np.ones(points_mm.shape[:-1], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Constellation:
    """The mean shape fitted to the modes of a scan.

    Attributes:
        expected_mm: Expected position of every landmark; NaN where it is not in the shape.
        choice: The mode of each landmark that agrees; -1 if none does.
    """

    expected_mm: Float64[np.ndarray, "landmarks 3"]
    choice: Int64[np.ndarray, " landmarks"]


@dataclass(frozen=True, slots=True)
class Rival:
    """Another arrangement of all landmarks that a scan shows nearly as clearly.

    Where landmarks form a chain of look-alikes, such as a spine, it is one link further along.

    Attributes:
        share: Mass of its modes, over that of the arrangement which it rivals; it may be above 1.
        distance_mm: How far apart both have the landmarks, on average.
    """

    share: float
    distance_mm: float


def fit_constellation(
    positions_mm: Float64[np.ndarray, "landmarks modes 3"],
    strength: Float64[np.ndarray, "landmarks modes"],
    shape: Shape,
    shows: Shows = _show_all,
) -> Constellation | None:
    """Fit the mean shape to the modes and choose the mode of every landmark.

    Args:
        positions_mm: Modes in mm in a right-handed frame; NaN where there is none.
        strength: How much each mode counts, in [0, 1]; 0 where there is none.
        shape: The mean shape, and how near a mode must be to agree with it.
        shows: Tells of points, in mm, which of them the scan shows.

    Returns:
        The fit, or None if fewer than four landmarks have modes, or no similarity brings at least
        four of them near to their expected positions, with half of the strength of all that it
        expects in the scan.
    """
    best = strength.max(axis=1, initial=0.0)
    usable = np.isfinite(positions_mm).all(axis=2) & (strength > 0)
    usable &= (strength >= MIN_RELATIVE_STRENGTH * best[:, None]) & shape.known[:, None]
    present = usable.any(axis=1)
    if present.sum() < MIN_LANDMARKS:
        return None
    tolerance_mm = shape.tolerance_mm
    cloud = np.where(usable[..., None], positions_mm, _ABSENT_MM)
    weight = np.where(usable, strength, 0.0)
    some = (shape.mean[present], cloud[present], weight[present])
    fit, score = _refine(_fit_strongest(*some), *some, tolerance_mm, shows)
    # Three landmarks nearly fit wherever they are: of four, most of a score may be theirs.
    if score < max(CLEAR_SCORE * weight.max(axis=1).sum(), MIN_LANDMARKS - 1):
        fit, score = _refine(_sample(*some, tolerance_mm), *some, tolerance_mm, shows)
    if score == 0.0:
        return None
    expected = transform(fit, shape.mean)
    distance = np.linalg.norm(cloud - np.nan_to_num(expected)[:, None], axis=2)
    nearest = distance.argmin(axis=1)
    agrees = (
        np.take_along_axis(distance, nearest[:, None], axis=1)[:, 0] <= tolerance_mm
    ) & present
    return Constellation(expected, np.where(agrees, nearest, -1))


def find_rival(
    found: Constellation,
    positions_mm: Float64[np.ndarray, "landmarks modes 3"],
    mass: Float64[np.ndarray, "landmarks modes"],
    shape: Shape,
) -> Rival | None:
    """Fit the mean shape once more, to the modes away from where a fit has them.

    Args:
        found: The fit.
        positions_mm: All modes, as for ``fit_constellation``.
        mass: Weight of votes of each mode; 0 where there is none.
        shape: As for ``fit_constellation``.

    Returns:
        The rival; None if it has far less mass, or the modes agree on none.
    """
    total, count = _mass_of(found, mass), (found.choice >= 0).sum()
    away = np.linalg.norm(positions_mm - found.expected_mm[:, None], axis=2) > shape.tolerance_mm
    others = np.where(away, mass, 0.0)
    if others.max(axis=1, initial=0.0).sum() < MIN_RIVAL_MASS * total:
        return None
    # As strengths, which are at most 1; masses may be more.
    other = fit_constellation(positions_mm, others / others.max(), shape)
    if other is None or (other.choice >= 0).sum() < MIN_RIVAL_COUNT * count:
        return None
    share = _mass_of(other, others) / total
    if share < MIN_RIVAL_MASS:
        return None
    moved = np.linalg.norm(other.expected_mm - found.expected_mm, axis=1)
    return Rival(share, float(np.nanmean(moved)))


def _mass_of(fit: Constellation, mass: Float64[np.ndarray, "landmarks modes"]) -> float:
    agrees = fit.choice >= 0
    return float(mass[agrees, fit.choice[agrees]].sum())


def _fit_strongest(
    mean: Float64[np.ndarray, "n 3"],
    cloud: Float64[np.ndarray, "n modes 3"],
    weight: Float64[np.ndarray, "n modes"],
) -> Float64[np.ndarray, "1 4 4"]:
    """Fit the strongest mode of every landmark."""
    chosen = (np.arange(len(mean)), weight.argmax(axis=1), weight.max(axis=1))
    columns = (column[None] for column in chosen)
    return np.asarray(cpu_constellation.fit_subsets(mean, cloud, *columns, SCALE_BOUNDS))


def _sample(
    mean: Float64[np.ndarray, "n 3"],
    cloud: Float64[np.ndarray, "n modes 3"],
    weight: Float64[np.ndarray, "n modes"],
    tolerance_mm: float,
) -> Float64[np.ndarray, "fits 4 4"]:
    """Fit triples of modes, strong ones more often; keep the fits that most modes agree with."""
    random = np.random.default_rng(0)  # Triples of one scan are those of any other as large.
    with np.errstate(divide="ignore"):
        log_weight = np.log(weight)
    # The largest of log weight + Gumbel noise is a draw with probability proportional to weight.
    noisy = log_weight.max(axis=1) + random.gumbel(size=(SAMPLES, len(mean)))
    landmark = np.argsort(-noisy, axis=1)[:, :3]
    if len(mean) > FEW:
        a, b, c = np.moveaxis(mean[landmark], 1, 0)
        area = np.linalg.norm(np.cross(b - a, c - a), axis=1)
        # Slender triangles determine a rotation badly.
        landmark = landmark[np.argsort(-area, kind="stable")[: SAMPLES // 2]]
    else:
        # In their own order: the same three fitted in another differ in their last bits.
        landmark = np.sort(landmark, axis=1)
    noise = random.gumbel(size=(*landmark.shape, weight.shape[1]))
    mode = (log_weight[landmark] + noise).argmax(axis=2)
    even = np.ones(landmark.shape)
    fits = cpu_constellation.fit_subsets(mean, cloud, landmark, mode, even, SCALE_BOUNDS)
    score = cpu_constellation.score(fits, mean, cloud, weight, 2 * tolerance_mm)
    _, best = np.unique(-score, return_index=True)  # Of few landmarks, triples come twice.
    return np.asarray(fits[best[:FINALISTS]])


def _refine(
    fits: Float64[np.ndarray, "fits 4 4"],
    mean: Float64[np.ndarray, "n 3"],
    cloud: Float64[np.ndarray, "n modes 3"],
    weight: Float64[np.ndarray, "n modes"],
    tolerance_mm: float,
    shows: Shows,
) -> tuple[Affine, float]:
    """Refine fits and choose the best of those that count as one.

    Returns:
        The fit, mean shape -> scan, and its score: 0 if none counts.
    """
    widths = tolerance_mm * np.array(ANNEALING)
    cpu_constellation.refine(fits, mean, cloud, weight, widths, SCALE_BOUNDS)
    score = cpu_constellation.score(fits, mean, cloud, weight, tolerance_mm)
    for best in np.argsort(-score, kind="stable"):
        expected = transform(fits[best], mean)
        near = np.linalg.norm(cloud - expected[:, None], axis=2) <= tolerance_mm
        agreed = np.where(near, weight, 0.0).max(axis=1).sum()
        least = MIN_AGREEMENT * weight.max(axis=1)[shows(expected)].sum()
        # Three landmarks nearly fit wherever they are, and may be stronger than more that do.
        if near.any(axis=1).sum() >= MIN_LANDMARKS and agreed >= least:
            return fits[best], float(score[best])
    return fits[0], 0.0
