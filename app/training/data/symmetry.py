"""mean shape -> partners: which landmark is which other one's mirror image.

Most bodies are alike on both sides. A scan and its mirror image are then two subjects to learn
from, if the landmarks of either side change their names.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Int64
from scipy.optimize import linear_sum_assignment

from app.geometry import Points
from app.training.data.specimens import Specimen
from app.voting import Similarity, fit_similarity

PLANES: Final = 48
"""Planes of symmetry to start from; fitting turns them by some ten degrees."""

ROUNDS: Final = 20
"""Rounds of matching and fitting; they settle in a few."""

TOLERANCE: Final = 0.03
"""A mirror image lies this near to its partner, in diagonals of the shape; else there is none."""

LEAST_SHARE: Final = 0.5
"""Of the landmarks, as many have a partner, or the shape is not symmetric."""


def find_partners(mean: Points) -> Int64[np.ndarray, " landmarks"] | None:
    """Find each landmark's mirror image among the landmarks.

    Args:
        mean: The mean shape, in any frame; NaN where a place is unknown.

    Returns:
        The partner of each landmark: itself in the plane of symmetry, -1 where there is none. None
        if the shape is not symmetric.
    """
    known = np.flatnonzero(np.isfinite(mean).all(axis=1))
    points = mean[known] - mean[known].mean(axis=0)
    # Where the plane of symmetry lies is not known, so one is tried in every direction.
    normals = np.random.default_rng(0).standard_normal((PLANES, 3))
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    tries = [_match(points @ (np.eye(3) - 2 * np.outer(n, n)), points) for n in normals]
    far = TOLERANCE * float(np.linalg.norm(np.ptp(points, axis=0)))
    best = min(tries, key=lambda found: float(np.minimum(_distances(found, points), far).mean()))
    match, near = best[1], _distances(best, points) <= far
    paired = near & near[match] & (match[match] == np.arange(len(match)))
    if paired.mean() < LEAST_SHARE:
        return None
    partners = np.full(len(mean), -1)
    partners[known[paired]] = known[match[paired]]
    return partners


def mirror(specimen: Specimen, partners: Int64[np.ndarray, " landmarks"]) -> Specimen:
    """Make the mirror image of a specimen; it shares the voxels.

    Args:
        specimen: The scan and its landmarks.
        partners: As ``find_partners`` gives them.

    Returns:
        The scan with the x axis of its world turned round; landmarks without a partner are NaN.
    """
    flip = np.diag([-1.0, 1.0, 1.0, 1.0])
    points = specimen.points[partners] * (-1.0, 1.0, 1.0)
    points[partners < 0] = np.nan
    return replace(specimen, to_world=flip @ specimen.to_world, points=points)


def with_mirror_images(specimens: Sequence[Specimen], mean: Points) -> tuple[Specimen, ...]:
    """Add the mirror image of every specimen.

    Raises:
        ValueError: The mean shape is not symmetric.
    """
    partners = find_partners(mean)
    if partners is None:
        raise ValueError("expected landmarks that are alike on both sides, found no symmetry")
    return (*specimens, *(mirror(specimen, partners) for specimen in specimens))


Match = tuple[Similarity, Int64[np.ndarray, " n"], Points]


def _match(image: Points, points: Points) -> Match:
    """Match the points of a mirror image with the points, moving it nearer to them every round."""
    fit = Similarity(np.ones(()), np.eye(3), np.zeros(3))
    for _ in range(ROUNDS):
        square = ((fit.apply(image)[:, None] - points[None]) ** 2).sum(axis=2)
        # Those without a partner are matched with anything, and shall neither displace nor pull.
        scale = np.median(square.min(axis=1)) + 1e-9
        _, match = linear_sum_assignment(square / (square + scale))
        weight = 1 / (1 + square[np.arange(len(match)), match] / scale) ** 2
        fit = fit_similarity(image, points[match], weight, scale_bounds=(1.0, 1.0))
    return fit, np.asarray(match), image


def _distances(found: Match, points: Points) -> np.ndarray:
    """Measure how far each mirror image lies from its match."""
    fit, match, image = found
    return np.asarray(np.linalg.norm(fit.apply(image) - points[match], axis=1))
