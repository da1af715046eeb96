"""Which landmark is which other one's mirror image, and mirrored specimens.

Most bodies are alike on both sides. A scan and its mirror image are then two subjects to train on,
if left and right landmarks swap their names.
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
"""Initial planes of symmetry; fitting turns them by some ten degrees."""

ROUNDS: Final = 20
"""Rounds of matching and fitting; they converge in a few."""

TOLERANCE: Final = 0.03
"""Largest distance of a mirror image from its partner, in diagonals of the shape."""

MIN_SHARE: Final = 0.5
"""Share of the landmarks that have a partner in a symmetric shape, at least."""


def find_partners(mean: Points) -> Int64[np.ndarray, " landmarks"] | None:
    """Find each landmark's mirror image among the landmarks.

    Args:
        mean: The mean shape, in any frame; NaN where unknown.

    Returns:
        The partner of each landmark: itself in the plane of symmetry, -1 where there is none. None
        if the shape is not symmetric.
    """
    known = np.flatnonzero(np.isfinite(mean).all(axis=1))
    points = mean[known] - mean[known].mean(axis=0)
    # The plane of symmetry is unknown, so planes of many directions are tried.
    normals = np.random.default_rng(0).standard_normal((PLANES, 3))
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    matches = [_match(points @ (np.eye(3) - 2 * np.outer(n, n)), points) for n in normals]
    limit = TOLERANCE * float(np.linalg.norm(np.ptp(points, axis=0)))
    best = min(
        matches, key=lambda match: float(np.minimum(_distances(match, points), limit).mean())
    )
    partner, close = best[1], _distances(best, points) <= limit
    paired = close & close[partner] & (partner[partner] == np.arange(len(partner)))
    if paired.mean() < MIN_SHARE:
        return None
    partners = np.full(len(mean), -1)
    partners[known[paired]] = known[partner[paired]]
    return partners


def mirror(specimen: Specimen, partners: Int64[np.ndarray, " landmarks"]) -> Specimen:
    """Return the mirror image of a specimen; it shares the voxels.

    Args:
        specimen: The scan and its landmarks.
        partners: As ``find_partners`` returns them.

    Returns:
        The scan with its world's x axis reversed; landmarks without a partner are NaN.
    """
    flip = np.diag([-1.0, 1.0, 1.0, 1.0])
    points = specimen.points[partners] * (-1.0, 1.0, 1.0)
    points[partners < 0] = np.nan
    absent = frozenset(np.flatnonzero(np.isin(partners, list(specimen.absent))).tolist())
    to_world = flip @ specimen.to_world
    return replace(specimen, to_world=to_world, points=points, absent=absent)


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
"""The fit of a mirror image to the points, each point's match, and the image."""


def _match(image: Points, points: Points) -> Match:
    """Match a mirror image with the points by alternating assignment and robust rigid fit."""
    fit = Similarity(np.ones(()), np.eye(3), np.zeros(3))
    for _ in range(ROUNDS):
        square = ((fit.apply(image)[:, None] - points[None]) ** 2).sum(axis=2)
        # Points without a partner are matched with anything, and must have little influence.
        scale = np.median(square.min(axis=1)) + 1e-9
        _, match = linear_sum_assignment(square / (square + scale))
        weight = 1 / (1 + square[np.arange(len(match)), match] / scale) ** 2
        fit = fit_similarity(image, points[match], weight, scale_bounds=(1.0, 1.0))
    return fit, np.asarray(match), image


def _distances(match: Match, points: Points) -> np.ndarray:
    """Measure the distance of each point of the mirror image from its match."""
    fit, partner, image = match
    return np.asarray(np.linalg.norm(fit.apply(image) - points[partner], axis=1))
