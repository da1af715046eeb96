"""Modes -> which of them agree with a mean shape, in NumPy float64: part of the reference.

All triples of modes of three landmarks are tried, each fit is refined, and the one wins that most
strength agrees with. It decides as the documentation says where one arrangement stands out.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.support.oracle import Array

LEAST_LANDMARKS = 4
"""That agree with a fit."""

SMALLEST, LARGEST = 0.5, 2.0
"""Of subjects, in sizes of the mean shape."""

STEPS = 12
"""Of the refinement of a fit."""

STILL_MM = 1e-7

FAINT, AGREEING = 0.1, 0.5
"""Least shares: of the strength of a landmark's strongest mode, for a mode to count; and of the
strengths of all strongest modes of landmarks that a fit expects in the scan, that must agree."""


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
    modes_mm: Sequence[Array],
    strengths: Sequence[Array],
    mean: Array,
    tolerance_mm: float,
    shows: Callable[[Array], bool] | None = None,
) -> list[ShapeOpinion]:
    """Choose the modes that agree with the best fit of a mean shape.

    Args:
        modes_mm: Of each landmark, (modes 3).
        strengths: Of each mode, up to 1, (modes,).
        mean: (landmarks 3), in mm.
        tolerance_mm: Within which a mode agrees.
        shows: Tells whether the scan shows a point in mm; None: it shows all.
    """
    strengths = [np.where(own < FAINT * own.max(initial=0.0), 0.0, own) for own in strengths]
    modes_mm = [own[one > 0] for own, one in zip(modes_mm, strengths, strict=True)]
    kept = [np.flatnonzero(one) for one in strengths]
    strengths = [one[one > 0] for one in strengths]
    best, found = 0.0, None
    for fit in _fits_of_three(modes_mm, mean, tolerance_mm):
        expected = _refine(fit, modes_mm, strengths, mean, tolerance_mm)
        chosen = _nearest(expected, modes_mm, tolerance_mm)
        agree = [own[b] for own, b in zip(strengths, chosen, strict=True) if b is not None]
        pairs = zip(strengths, expected, strict=True)
        shown = [own for own, at in pairs if shows is None or shows(at)]
        least = AGREEING * sum(own.max(initial=0.0) for own in shown)
        if len(agree) < LEAST_LANDMARKS or sum(agree) < least:
            continue
        score = _score(expected, modes_mm, strengths, tolerance_mm)
        if score > best:
            best, found = score, (expected, chosen)
    if found is None:
        return [ShapeOpinion(None, None) for _ in mean]
    rows = zip(found[1], found[0], kept, strict=True)
    return [
        ShapeOpinion(None if chosen is None else int(own[chosen]), expected)
        for chosen, expected, own in rows
    ]


def _fits_of_three(modes_mm: Sequence[Array], mean: Array, tolerance_mm: float) -> Iterator[Array]:
    """Fit all modes of all three landmarks; yields the fits that bring them near."""
    for triple in itertools.combinations(range(len(mean)), 3):
        source = mean[list(triple)]
        for picked in itertools.product(*[range(len(modes_mm[one])) for one in triple]):
            points = np.array([modes_mm[a][b] for a, b in zip(triple, picked, strict=True)])
            # Sides of a triangle that differ more than any size allows fit nowhere.
            if not _may_fit(source, points, tolerance_mm):
                continue
            fit = fit_similarity(source, points, np.ones(3))
            size = np.cbrt(np.linalg.det(fit[:3, :3]))
            off = np.linalg.norm(_move(fit, source) - points, axis=1)
            if off.max() <= tolerance_mm and SMALLEST <= size <= LARGEST:
                yield fit


def _may_fit(source: Array, target: Array, tolerance_mm: float) -> bool:
    """Say whether the sides of a triangle are those of another of any size, up to the tolerance."""
    sides = [np.sqrt(((one - one[[1, 2, 0]]) ** 2).sum(axis=1)) for one in (source, target)]
    least = (sides[1] - 2 * tolerance_mm) / sides[0]
    most = (sides[1] + 2 * tolerance_mm) / sides[0]
    return bool(max(least.max(), SMALLEST) <= min(most.min(), LARGEST))


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
    expected = _move(fit, mean)
    for _ in range(STEPS):
        nearest = _nearest(expected, modes_mm, np.inf)
        rows = [row for row, one in enumerate(nearest) if one is not None]
        points = np.array([modes_mm[row][nearest[row] or 0] for row in rows])
        strength = np.array([strengths[row][nearest[row] or 0] for row in rows])
        off = np.linalg.norm(points - expected[rows], axis=1) / tolerance_mm
        before, fit = expected, fit_similarity(mean[rows], points, strength / (1 + off**2) ** 2)
        expected = _move(fit, mean)
        if np.abs(expected - before).max() < STILL_MM:
            break
    return expected


def _score(
    expected: Array, modes_mm: Sequence[Array], strengths: Sequence[Array], tolerance_mm: float
) -> float:
    """Sum the strengths of the modes that agree, by the weights of Geman and McClure, too."""
    total = 0.0
    for place, modes, own in zip(expected, modes_mm, strengths, strict=True):
        square = ((modes - place) ** 2).sum(axis=1) / tolerance_mm**2
        total += float((own / (1 + square) ** 2).max(initial=0.0))
    return total


def _nearest(expected: Array, modes_mm: Sequence[Array], most_mm: float) -> list[int | None]:
    found: list[int | None] = []
    for place, modes in zip(expected, modes_mm, strict=True):
        away = np.linalg.norm(modes - place, axis=1) if len(modes) else np.array([np.inf])
        is_near = len(modes) and away.min() <= most_mm
        found.append(int(away.argmin()) if is_near else None)
    return found


def _move(fit: Array, points: Array) -> Array:
    return np.asarray(points @ fit[:3, :3].T + fit[:3, 3])
