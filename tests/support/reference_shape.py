"""Modes -> which of them agree with a mean shape, in NumPy float64: part of the reference.

All triples of modes of three landmarks are tried, each fit is refined, and the one wins that most
strength agrees with. It decides as the documentation says where one arrangement stands out.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.support.oracle import Array

LEAST_LANDMARKS = 4
"""That agree with a fit."""

SMALLEST, LARGEST = 0.5, 2.0
"""Of subjects, in sizes of the mean shape."""

STEPS = 12
"""Of the refinement of a fit."""


@dataclass(frozen=True, slots=True)
class ShapeOpinion:
    """What the shape says of one landmark.

    Attributes:
        chosen: Its mode that agrees; None: none does.
        expected_mm: Where the fitted shape has it, in mm, RAS; None without a fit.
        plausible: Whether enough landmarks agree.
    """

    chosen: int | None
    expected_mm: Array | None
    plausible: bool = True


def choose_by_shape(
    modes_mm: Sequence[Array], strengths: Sequence[Array], mean: Array, tolerance_mm: float
) -> list[ShapeOpinion]:
    """Choose the modes that agree with the best fit of a mean shape.

    Args:
        modes_mm: Of each landmark, (modes 3).
        strengths: Of each mode, up to 1, (modes,).
        mean: (landmarks 3), in mm.
        tolerance_mm: Within which a mode agrees.
    """
    best, found = 0.0, None
    for triple in itertools.combinations(range(len(mean)), 3):
        for picked in itertools.product(*[range(len(modes_mm[one])) for one in triple]):
            points = np.array([modes_mm[a][b] for a, b in zip(triple, picked, strict=True)])
            fit = fit_similarity(mean[list(triple)], points, np.ones(3))
            size = np.cbrt(np.linalg.det(fit[:3, :3]))
            off = np.linalg.norm(_move(fit, mean[list(triple)]) - points, axis=1)
            if off.max() > tolerance_mm or not SMALLEST <= size <= LARGEST:
                continue
            expected = _refine(fit, modes_mm, strengths, mean, tolerance_mm)
            chosen = _nearest(expected, modes_mm, tolerance_mm)
            score = sum(strengths[a][b] for a, b in enumerate(chosen) if b is not None)
            if score > best and sum(one is not None for one in chosen) >= LEAST_LANDMARKS:
                best, found = score, (expected, chosen)
    if found is None:
        return [ShapeOpinion(None, None) for _ in mean]
    pairs = zip(found[1], found[0], strict=True)
    return [ShapeOpinion(chosen, expected) for chosen, expected in pairs]


def fit_similarity(source: Array, target: Array, weight: Array) -> Array:
    """Fit rotation, translation and scale, 4 x 4, by least squares (Umeyama, 1991)."""
    share = weight / weight.sum()
    middles = share @ source, share @ target
    off, onto = source - middles[0], target - middles[1]
    left, sizes, right = np.linalg.svd(onto.T @ (share[:, None] * off))
    signs = np.array([1.0, 1.0, np.sign(np.linalg.det(left @ right))])
    scale = (sizes @ signs) / (share @ (off**2).sum(axis=1))
    affine = np.eye(4)
    affine[:3, :3] = scale * left @ np.diag(signs) @ right
    affine[:3, 3] = middles[1] - affine[:3, :3] @ middles[0]
    return affine


def _refine(
    fit: Array,
    modes_mm: Sequence[Array],
    strengths: Sequence[Array],
    mean: Array,
    tolerance_mm: float,
) -> Array:
    """Fit again to the modes nearest to the fit, by the weights of Geman and McClure."""
    for _ in range(STEPS):
        expected = _move(fit, mean)
        nearest = _nearest(expected, modes_mm, np.inf)
        rows = [row for row, one in enumerate(nearest) if one is not None]
        points = np.array([modes_mm[row][nearest[row] or 0] for row in rows])
        strength = np.array([strengths[row][nearest[row] or 0] for row in rows])
        off = np.linalg.norm(points - expected[rows], axis=1) / tolerance_mm
        fit = fit_similarity(mean[rows], points, strength / (1 + off**2) ** 2)
    return _move(fit, mean)


def _nearest(expected: Array, modes_mm: Sequence[Array], most_mm: float) -> list[int | None]:
    found: list[int | None] = []
    for place, modes in zip(expected, modes_mm, strict=True):
        away = np.linalg.norm(modes - place, axis=1) if len(modes) else np.array([np.inf])
        is_near = len(modes) and away.min() <= most_mm
        found.append(int(away.argmin()) if is_near else None)
    return found


def _move(fit: Array, points: Array) -> Array:
    return np.asarray(points @ fit[:3, :3].T + fit[:3, 3])
