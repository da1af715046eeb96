"""A cohort -> shapes without size and pose, their mean, and the main ways in which they vary.

F. J. Rohlf, D. Slice, "Extensions of the Procrustes method for the optimal superimposition of
landmarks", Systematic Zoology 39 (1990); I. L. Dryden, K. V. Mardia, "Statistical Shape Analysis"
(2016), chapters 7 and 9. A missing point is put, at every step, where the mean shape fitted to the
specimen's other points has it: it then adds nothing to the sum of squares that is made least.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from app.errors import BadParameter
from app.shapes.cohort import Cohort
from app.shapes.similarity import (
    MIN_LANDMARKS,
    drop_collapsed,
    find_connected,
    fit_similarity,
    mean_shape,
)

MAX_ROUNDS: Final = 500
CONVERGED: Final = 1e-10
"""Change of the mean shape, whose size is one, in a round that ends the search."""

MIN_SPECIMENS: Final = 3

Shapes = Float64[np.ndarray, "specimens landmarks 3"]


@dataclass(frozen=True, slots=True)
class ShapeSpace:
    """Shapes of specimens and how they vary.

    Attributes:
        specimens: Those with enough landmarks, by name.
        landmarks: Those that any of them has, by name.
        known: Which of their points were not missing.
        shapes: Of centroid size one around the origin, in the pose of the mean shape; missing
            points are estimated.
        mean: The mean shape, of centroid size one.
        size_mm: Centroid sizes: roots of the sums of squared distances from the centroid.
        distance: Of each shape from the mean (partial Procrustes distance).
        components: Directions in which shapes vary most, orthonormal, in tangent space.
        scores: Coordinates of the shapes along these.
        explained: Share of the variance along each component.
    """

    specimens: tuple[str, ...]
    landmarks: tuple[str, ...]
    known: Bool[np.ndarray, "specimens landmarks"]
    shapes: Shapes
    mean: Float64[np.ndarray, "landmarks 3"]
    size_mm: Float64[np.ndarray, " specimens"]
    distance: Float64[np.ndarray, " specimens"]
    components: Float64[np.ndarray, "components landmarks 3"]
    scores: Float64[np.ndarray, "specimens components"]
    explained: Float64[np.ndarray, " components"]


def analyse_shapes(cohort: Cohort) -> ShapeSpace:
    """Superimpose the specimens (generalised Procrustes analysis) and find principal components.

    Raises:
        BadParameter: Fewer than three specimens share enough landmarks that are not in one place.
    """
    placed = drop_collapsed(cohort.points)
    known = np.isfinite(placed).all(axis=2)
    rows = np.flatnonzero(find_connected(placed, MIN_LANDMARKS))
    if len(rows) < MIN_SPECIMENS:
        raise BadParameter(
            f"expected {MIN_SPECIMENS} specimens with {MIN_LANDMARKS} landmarks in common with the "
            f"one that has most, not all in one place, got {len(rows)}"
        )
    columns = np.flatnonzero(known[rows].any(axis=0))
    known = known[rows][:, columns]
    points = np.where(known[..., None], placed[rows][:, columns], 0.0)
    shapes, mean, size_mm = _superimpose(points, known)
    # Shapes lie on a sphere; components are straight lines in the plane that touches it.
    flat, pole = shapes.reshape(len(rows), -1), mean.ravel()
    tangent = flat - (flat @ pole)[:, None] * pole
    centred = tangent - tangent.mean(axis=0)
    left, singular, directions = np.linalg.svd(centred, full_matrices=False)
    count = min(len(rows) - 1, int((singular > 1e-9 * max(singular[0], 1e-12)).sum()))
    sign = np.sign(directions[np.arange(count), np.abs(directions[:count]).argmax(axis=1)])
    variance = singular**2
    return ShapeSpace(
        specimens=tuple(cohort.specimens[row] for row in rows),
        landmarks=tuple(cohort.landmarks[column] for column in columns),
        known=known,
        shapes=shapes,
        mean=mean,
        size_mm=size_mm,
        distance=np.linalg.norm(shapes - mean, axis=(1, 2)),
        components=(sign[:, None] * directions[:count]).reshape(count, *mean.shape),
        scores=sign * left[:, :count] * singular[:count],
        explained=variance[:count] / max(variance.sum(), 1e-300),
    )


def _superimpose(
    points: Shapes, known: Bool[np.ndarray, "specimens landmarks"]
) -> tuple[Shapes, Float64[np.ndarray, "landmarks 3"], Float64[np.ndarray, " specimens"]]:
    """Return shapes, their mean, and centroid sizes in mm."""
    first = mean_shape(list(np.where(known[..., None], points, np.nan)))
    mean = first / np.linalg.norm(first)
    for _ in range(MAX_ROUNDS):
        target = np.broadcast_to(mean, points.shape)
        estimated = fit_similarity(target, points, known.astype(np.float64)).apply(target)
        whole = np.where(known[..., None], points, estimated)
        whole = whole - whole.mean(axis=1, keepdims=True)
        size_mm = np.linalg.norm(whole, axis=(1, 2))
        shapes = whole / size_mm[:, None, None]
        turn = fit_similarity(shapes, target, np.ones(known.shape), (1.0, 1.0))
        shapes = turn.apply(shapes)
        before, mean = mean, shapes.mean(axis=0)
        mean = mean / np.linalg.norm(mean)
        if np.abs(mean - before).max() < CONVERGED:
            break
    return shapes, mean, size_mm
