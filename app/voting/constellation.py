"""Modes -> the chosen mode of every landmark: the one that agrees with the shape of them all.

A network that sees a neighbourhood confuses look-alikes: left for right, tooth for tooth. The shape
of all landmarks together does not. The mean shape is fitted to the modes by a robust similarity
(rotation, translation, bounded scale, no reflection), and each landmark takes the mode nearest to
the fit. The shape selects and flags; it never moves a point.

Similarity: S. Umeyama, "Least-squares estimation of transformation parameters between two point
patterns", IEEE PAMI 13 (1991). Robust start: fits to three landmarks each (RANSAC), drawn by a
fixed seed. Refinement: iteratively reweighted least squares with the Geman-McClure weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

LEAST_LANDMARKS: Final = 4
"""Three points fit any triangle's similarity too well to be evidence."""

SCALE_BOUNDS: Final = (0.5, 2.0)
"""A subject is at least half and at most twice as large as the mean one."""

DRAWS: Final = 1024
"""Triples drawn. With a third of the modes right, 1 in 27 triples is: some 20 of the kept half."""

FINALISTS: Final = 8
"""Best triples that are refined; the best refined one wins."""

ANNEALING: Final = (4.0, 3.0, 2.0, 1.5, 1.0, 1.0, 1.0, 1.0)
"""Scale of the robust weight in each refinement step, in tolerances: wide first, as a triple's fit
is off far away from it."""

PLAUSIBLE: Final = 0.1
"""A mode with less than this share of its landmark's strongest one takes no part."""

AGREEMENT: Final = 0.5
"""Least share of all strength that must lie in modes near the fit for it to count as one."""

MEAN_SHAPE_ROUNDS: Final = 20
"""Rounds of generalised Procrustes; it settles in a few."""

_NOWHERE: Final = 1e6
"""Stands for the place of a mode that does not exist, in mm: finite, and far from everything."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The mean constellation of a model's landmarks.

    Attributes:
        mean: Positions in mm in any right-handed frame; a NaN row is a landmark of unknown place.
        tolerance_mm: A mode this near to its expected place agrees with a fit.
        modes: How many modes per landmark to choose among.
    """

    mean: Float64[np.ndarray, "landmarks 3"]
    tolerance_mm: float
    modes: int = 4

    def knows(self) -> Bool[np.ndarray, " landmarks"]:
        """Say which landmarks have a known place."""
        return np.asarray(np.isfinite(self.mean).all(axis=1))


@dataclass(frozen=True, slots=True)
class Similarity:
    """A map x -> scale * rotation @ x + translation, or several at once.

    Attributes:
        scale: Size of the target over that of the source.
        rotation: Proper rotation.
        translation: In mm.
    """

    scale: Float64[np.ndarray, "*n"]
    rotation: Float64[np.ndarray, "*n 3 3"]
    translation: Float64[np.ndarray, "*n 3"]

    def apply(self, points: Float64[np.ndarray, "*m 3"]) -> Float64[np.ndarray, "*k 3"]:
        """Map points."""
        turned = points @ np.swapaxes(self.rotation, -1, -2)
        return np.asarray(self.scale[..., None, None] * turned + self.translation[..., None, :])


@dataclass(frozen=True, slots=True)
class Constellation:
    """What the fitted shape says.

    Attributes:
        expected_mm: Where it expects every landmark; NaN where its place is unknown.
        choice: The mode of each landmark that agrees; -1 if none does.
        scale: Size of this subject over that of the mean shape.
    """

    expected_mm: Float64[np.ndarray, "landmarks 3"]
    choice: Int64[np.ndarray, " landmarks"]
    scale: float


def fit_constellation(
    positions_mm: Float64[np.ndarray, "landmarks modes 3"],
    strength: Float64[np.ndarray, "landmarks modes"],
    shape: Shape,
) -> Constellation | None:
    """Fit the mean shape to the modes and choose the mode of every landmark.

    Args:
        positions_mm: Modes in mm in a right-handed frame; NaN where there is none.
        strength: How much each mode counts, in [0, 1]; 0 where there is none.
        shape: The mean shape, and how near a mode must be to agree with it.

    Returns:
        The choice, or None if fewer than four landmarks are there to fit, or no similarity brings
        at least four of them, with half of all strength, near to their expected places.
    """
    best = strength.max(axis=1, initial=0.0)
    usable = np.isfinite(positions_mm).all(axis=2) & (strength > 0)
    usable &= (strength >= PLAUSIBLE * best[:, None]) & shape.knows()[:, None]
    present = usable.any(axis=1)
    if present.sum() < LEAST_LANDMARKS:
        return None
    tolerance_mm = shape.tolerance_mm
    cloud = np.where(usable[..., None], positions_mm, _NOWHERE)
    weight = np.where(usable, strength, 0.0)
    fit = _refine(
        _draw(cloud[present], weight[present], shape.mean[present], tolerance_mm),
        cloud[present],
        weight[present],
        shape.mean[present],
        tolerance_mm,
    )
    expected = fit.apply(shape.mean)
    distance = np.linalg.norm(cloud - np.nan_to_num(expected)[:, None], axis=2)
    nearest = distance.argmin(axis=1)
    agrees = (
        np.take_along_axis(distance, nearest[:, None], axis=1)[:, 0] <= tolerance_mm
    ) & present
    agreed = np.take_along_axis(weight, nearest[:, None], axis=1)[agrees].sum()
    if agrees.sum() < LEAST_LANDMARKS or agreed < AGREEMENT * weight.max(axis=1).sum():
        return None
    return Constellation(expected, np.where(agrees, nearest, -1), float(fit.scale))


def fit_similarity(
    source: Float64[np.ndarray, "*n points 3"],
    target: Float64[np.ndarray, "*n points 3"],
    weight: Float64[np.ndarray, "*n points"],
    scale_bounds: tuple[float, float] = (0.0, np.inf),
) -> Similarity:
    """Fit the similarity that maps source to target with the least weighted square error (Umeyama).

    Args:
        source: Points; leading axes are independent fits.
        target: Where they should go.
        weight: What each point counts.
        scale_bounds: Least and greatest scale; the other parameters are the best for the bound.

    Returns:
        The fit; its rotation is never a reflection.
    """
    share = weight / weight.sum(axis=-1, keepdims=True)
    source_mean = (share[..., None] * source).sum(axis=-2)
    target_mean = (share[..., None] * target).sum(axis=-2)
    centred = source - source_mean[..., None, :]
    covariance = np.swapaxes(target - target_mean[..., None, :], -1, -2) @ (
        share[..., None] * centred
    )
    u, singular, vt = np.linalg.svd(covariance)
    sign = np.ones_like(singular)
    sign[..., 2] = np.sign(np.linalg.det(u) * np.linalg.det(vt))
    rotation = (u * sign[..., None, :]) @ vt
    variance = (share * (centred**2).sum(axis=-1)).sum(axis=-1)
    scale = np.clip((singular * sign).sum(axis=-1) / np.maximum(variance, 1e-12), *scale_bounds)
    moved = scale[..., None] * (rotation @ source_mean[..., None])[..., 0]
    return Similarity(np.asarray(scale), rotation, target_mean - moved)


def mean_shape(
    point_sets: Sequence[Float64[np.ndarray, "landmarks 3"]],
) -> Float64[np.ndarray, "landmarks 3"]:
    """Average constellations of different subjects in different poses: generalised Procrustes.

    Args:
        point_sets: One constellation per subject, in mm; NaN rows where a landmark is unknown.
            Every set shares at least three landmarks with the one that knows most.

    Returns:
        The mean shape, around the origin, in the pose of the set that knows most landmarks and of
        the subjects' (geometric) mean size; NaN rows where no set knows a landmark.
    """
    stack = np.stack(point_sets)
    known = np.isfinite(stack).all(axis=2)
    mean = stack[known.sum(axis=1).argmax()]
    points = np.where(known[..., None], stack, 0.0)
    for _ in range(MEAN_SHAPE_ROUNDS):
        common = known & np.isfinite(mean).all(axis=1)
        target = np.broadcast_to(np.nan_to_num(mean), points.shape)
        fits = fit_similarity(points, target, common.astype(np.float64))
        aligned = np.where(known[..., None], fits.apply(points), 0.0)
        counts = known.sum(axis=0)[:, None]
        summed = aligned.sum(axis=0) / np.exp(np.log(fits.scale).mean())
        mean = np.where(counts > 0, summed / np.maximum(counts, 1), np.nan)
        mean = mean - np.nanmean(mean, axis=0)
    return np.asarray(mean)


def _draw(
    cloud: Float64[np.ndarray, "n modes 3"],
    weight: Float64[np.ndarray, "n modes"],
    mean: Float64[np.ndarray, "n 3"],
    tolerance_mm: float,
) -> Similarity:
    """Fit triples of modes, strong ones more often; keep the fits that most modes agree with."""
    random = np.random.default_rng(0)
    with np.errstate(divide="ignore"):
        log_weight = np.log(weight)
    # The largest of log weight + Gumbel noise is a draw with probability proportional to weight.
    noisy = log_weight.max(axis=1) + random.gumbel(size=(DRAWS, len(mean)))
    landmark = np.argsort(-noisy, axis=1)[:, :3]
    a, b, c = np.moveaxis(mean[landmark], 1, 0)
    area = np.linalg.norm(np.cross(b - a, c - a), axis=1)
    landmark = landmark[np.argsort(-area, kind="stable")[: DRAWS // 2]]  # Slivers say little.
    noise = random.gumbel(size=(*landmark.shape, weight.shape[1]))
    mode = (log_weight[landmark] + noise).argmax(axis=2)
    fits = fit_similarity(
        mean[landmark], cloud[landmark, mode], np.ones(landmark.shape), SCALE_BOUNDS
    )
    score = _score(fits, cloud, weight, mean, 2 * tolerance_mm)
    return _take(fits, np.argsort(-score, kind="stable")[:FINALISTS])


def _refine(
    fits: Similarity,
    cloud: Float64[np.ndarray, "n modes 3"],
    weight: Float64[np.ndarray, "n modes"],
    mean: Float64[np.ndarray, "n 3"],
    tolerance_mm: float,
) -> Similarity:
    """Refit each fit to the modes nearest to it, reselecting them as it moves; return the best."""
    rows = np.arange(len(mean))
    for width in ANNEALING:
        square = _square_distance(fits, cloud, mean)
        nearest = square.argmin(axis=2)
        square = np.take_along_axis(square, nearest[..., None], axis=2)[..., 0]
        robust = weight[rows, nearest] / (1 + square / (width * tolerance_mm) ** 2) ** 2
        source = np.broadcast_to(mean, (*nearest.shape, 3))
        fits = fit_similarity(source, cloud[rows, nearest], robust, SCALE_BOUNDS)
    score = _score(fits, cloud, weight, mean, tolerance_mm)
    return _take(fits, np.asarray(score.argmax()))


def _score(
    fits: Similarity,
    cloud: Float64[np.ndarray, "n modes 3"],
    weight: Float64[np.ndarray, "n modes"],
    mean: Float64[np.ndarray, "n 3"],
    width_mm: float,
) -> Float64[np.ndarray, " fits"]:
    """Sum the strength of the modes that agree with a fit, less the further they are off."""
    closeness = 1 / (1 + _square_distance(fits, cloud, mean) / width_mm**2) ** 2
    return np.asarray((weight * closeness).max(axis=2).sum(axis=1))


def _square_distance(
    fits: Similarity, cloud: Float64[np.ndarray, "n modes 3"], mean: Float64[np.ndarray, "n 3"]
) -> Float64[np.ndarray, "fits n modes"]:
    return np.asarray(((cloud - fits.apply(mean)[:, :, None]) ** 2).sum(axis=-1))


def _take(fits: Similarity, index: Int64[np.ndarray, "*m"]) -> Similarity:
    scale = np.asarray(fits.scale[index])
    return Similarity(scale, fits.rotation[index], fits.translation[index])
