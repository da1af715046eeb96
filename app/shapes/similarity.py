"""Similarities (rotation, translation, scale) between point sets, and the mean of many of them.

S. Umeyama, "Least-squares estimation of transformation parameters between two point patterns", IEEE
PAMI 13 (1991); J. C. Gower, "Generalized Procrustes analysis", Psychometrika 40 (1975).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64
from nibabel.quaternions import mat2quat

from app.geometry import Affine

MIN_LANDMARKS: Final = 4
"""Three points fit any triangle's similarity too well to be evidence."""

MIN_COMMON: Final = 3
"""Points that determine a similarity."""

SCALE_BOUNDS: Final = (0.5, 2.0)
"""A subject is at least half and at most twice as large as the mean one."""

PROCRUSTES_ROUNDS: Final = 20
"""Rounds of generalised Procrustes analysis; it converges in a few."""


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

    @property
    def affine(self) -> Affine:
        """The map as an affine, if it is one."""
        affine = np.eye(4)
        affine[:3, :3], affine[:3, 3] = self.scale * self.rotation, self.translation
        return affine

    def apply(self, points: Float64[np.ndarray, "*m 3"]) -> Float64[np.ndarray, "*k 3"]:
        """Map points."""
        rotated = points @ np.swapaxes(self.rotation, -1, -2)
        return np.asarray(self.scale[..., None, None] * rotated + self.translation[..., None, :])


def fit_similarity(
    source: Float64[np.ndarray, "*n points 3"],
    target: Float64[np.ndarray, "*n points 3"],
    weight: Float64[np.ndarray, "*n points"],
    scale_bounds: tuple[float, float] = (0.0, np.inf),
) -> Similarity:
    """Fit the similarity that maps source to target with the least weighted square error (Umeyama).

    Args:
        source: Points; leading axes are independent fits.
        target: The points to map them to.
        weight: Weight of each pair of points.
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


def measure_stretch(
    source: Float64[np.ndarray, "points 3"],
    target: Float64[np.ndarray, "points 3"],
    least_spread_mm: float,
) -> Float64[np.ndarray, " axes"]:
    """Measure how much larger a point set is than another along each axis.

    Args:
        source: Points in mm, none of them unknown.
        target: The points that correspond to them, in mm.
        least_spread_mm: Axes of the source along which its points spread by less (root mean
            square) are left out: a size along them would be that of errors.

    Returns:
        The principal stretches of the affine map that fits best, the largest first.
    """
    centred = source - source.mean(axis=0)
    _, spread, axes = np.linalg.svd(centred, full_matrices=False)
    wide = axes[spread >= least_spread_mm * np.sqrt(len(source))]
    fit, *_ = np.linalg.lstsq(centred @ wide.T, target - target.mean(axis=0), rcond=None)
    return np.linalg.svd(fit, compute_uv=False)


def measure_twist(
    source: Float64[np.ndarray, "points 3"], target: Float64[np.ndarray, "points 3"]
) -> float:
    """Measure by how much a point set is turned about its own longest axis, in degrees."""
    rotation = fit_similarity(source, target, np.ones(len(source))).rotation
    longest = np.linalg.svd(source - source.mean(axis=0), full_matrices=False)[2][0]
    real, *imaginary = mat2quat(rotation)
    # A swing after a twist: the part of the quaternion along the axis, over its real part.
    return float(np.degrees(2 * np.arctan2(abs(longest @ imaginary), abs(real))))


def drop_collapsed(
    sets: Float64[np.ndarray, "specimens landmarks 3"],
) -> Float64[np.ndarray, "specimens landmarks 3"]:
    """Count the points of a set as missing if all are in one place: it has no size and no pose.

    Files of other tools may list points that were never placed, all at 0, 0, 0.
    """
    known = np.isfinite(sets).all(axis=2, keepdims=True)
    low = np.where(known, sets, np.inf).min(axis=1, initial=np.inf)
    high = np.where(known, sets, -np.inf).max(axis=1, initial=-np.inf)
    spans = (high > low).any(axis=1)
    return np.where(spans[:, None, None], sets, np.nan)


def find_connected(
    sets: Float64[np.ndarray, "specimens landmarks 3"], least: int
) -> Bool[np.ndarray, " specimens"]:
    """Find the sets that can be fitted to the one that has most landmarks.

    Args:
        sets: Points; NaN where one is missing.
        least: How many landmarks a set must share with that one, not all in one place in either.
    """
    known = np.isfinite(sets).all(axis=2)
    most = known.sum(axis=1).argmax()
    shared = (known & known[most])[..., None]
    both = [drop_collapsed(np.where(shared, one, np.nan)) for one in (sets, sets[most])]
    return np.asarray(np.isfinite(both).all(axis=(0, 3)).sum(axis=1) >= least)


def mean_shape(
    point_sets: Sequence[Float64[np.ndarray, "landmarks 3"]],
) -> Float64[np.ndarray, "landmarks 3"]:
    """Average point sets of different subjects in different poses: generalised Procrustes analysis.

    Args:
        point_sets: The landmarks of each subject, in mm; NaN rows where one is unknown. Sets that
            share fewer than ``MIN_COMMON`` landmarks with the one that has most, or only such as
            are all in one place, are left out.

    Returns:
        The mean shape, around the origin, in the pose of the set that has most landmarks and of the
        subjects' (geometric) mean size; NaN rows where no set has the landmark.
    """
    stack = np.stack(point_sets)
    known = np.isfinite(stack).all(axis=2)
    most = known.sum(axis=1).argmax()
    mean = stack[most]
    rich = find_connected(stack, MIN_COMMON)
    rich[most] = True
    stack, known = stack[rich], known[rich]
    points = np.where(known[..., None], stack, 0.0)
    for _ in range(PROCRUSTES_ROUNDS):
        common = known & np.isfinite(mean).all(axis=1)
        target = np.broadcast_to(np.nan_to_num(mean), points.shape)
        fits = fit_similarity(points, target, common.astype(np.float64))
        aligned = np.where(known[..., None], fits.apply(points), 0.0)
        counts = known.sum(axis=0)[:, None]
        summed = aligned.sum(axis=0) / np.exp(np.log(fits.scale).mean())
        mean = np.where(counts > 0, summed / np.maximum(counts, 1), np.nan)
        mean = mean - np.nanmean(mean, axis=0)
    return np.asarray(mean)
