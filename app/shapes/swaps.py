"""Names of landmarks that look exchanged, as the other specimens' constellation tells."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Int64

from app.geometry import Points
from app.shapes.robust_shape import RobustShape, fit_to, residuals

MAX_SWAPS: Final = 6
"""Swapped pairs searched for in one scan; with more, all of its names are in doubt."""

MAX_TRIED: Final = 30
"""Likeliest pairs tried for each: of a curve placed backwards, all points are misplaced."""

MAX_REMAINING_ERROR: Final = 1 / 3
"""A swap explains two misplaced landmarks if it leaves at most this share of their errors."""


@dataclass(frozen=True, slots=True)
class Labelling:
    """The landmarks of one scan under an assignment of names that may be wrong.

    Attributes:
        points: Positions in mm; NaN where there is none.
        residual_mm: Distance of each from its position in the robust shape.
    """

    points: Points
    residual_mm: np.ndarray

    def cost(self, limit_mm: np.ndarray) -> float:
        """Sum the residuals in units of their limits, each clipped at three."""
        return float(np.nansum(np.minimum(self.residual_mm / limit_mm, 3.0)))

    def misplaced(self, limit_mm: np.ndarray) -> Int64[np.ndarray, " n"]:
        """List the landmarks beyond their limit."""
        return np.flatnonzero(self.residual_mm > limit_mm)


@dataclass(frozen=True, slots=True)
class Swaps:
    """What looks exchanged in one specimen.

    Attributes:
        sides: Whether the names of left and right do.
        pairs: Indices of further landmarks that do, two by two, by the names that they have now.
        labelling: The landmarks with all that put right.
        given: Index of the name that each of these has now, by which its file knows it; -1: none.
    """

    sides: bool
    pairs: tuple[tuple[int, int], ...]
    labelling: Labelling
    given: Int64[np.ndarray, " landmarks"]

    def describe(self, names: Sequence[str]) -> list[str]:
        """Say it in words, one line each."""
        lines = [f"landmarks {names[a]} and {names[b]} look swapped" for a, b in self.pairs]
        return [*(["the names of left and right look exchanged"] if self.sides else []), *lines]


def find_swaps(labelling: Labelling, shape: RobustShape) -> Swaps:
    """Find landmarks of a specimen whose exchange of names puts misplaced ones in place."""
    given = np.arange(len(labelling.points))
    mirrored = _swap_sides(labelling, shape)
    if mirrored is not None and shape.partners is not None:
        labelling, given = mirrored, shape.partners.copy()
    pairs: list[tuple[int, int]] = []
    while len(pairs) < MAX_SWAPS:
        swap = _best_swap(labelling, shape)
        if swap is None:
            break
        first, second, labelling = swap
        pairs.append((int(given[first]), int(given[second])))
        given[[first, second]] = given[[second, first]]
    return Swaps(mirrored is not None, tuple(pairs), labelling, given)


def _relabel(labelling: Labelling, order: np.ndarray, shape: RobustShape) -> Labelling:
    """Give each landmark the position of another one; -1 in the order: none."""
    points = np.where((order >= 0)[:, None], labelling.points[order], np.nan)
    fit, usable = fit_to(points[None], shape.points)
    if not usable[0]:
        return replace(labelling, residual_mm=np.full(len(points), np.inf))
    return Labelling(points, residuals(points[None], shape.points, fit)[0])


def _best_swap(labelling: Labelling, shape: RobustShape) -> tuple[int, int, Labelling] | None:
    """Find the two landmarks whose swap puts both in place, if there are such."""
    limit = shape.limit_mm
    before = labelling.cost(limit)
    best: tuple[int, int, Labelling] | None = None
    for first, second in _likely_swaps(labelling, shape):
        order = np.arange(len(limit))
        order[[first, second]] = second, first
        swapped = _relabel(labelling, order, shape)
        pair = [first, second]
        remaining = swapped.residual_mm[pair].sum() / labelling.residual_mm[pair].sum()
        within = bool((swapped.residual_mm[pair] <= limit[pair]).all())
        explained = remaining <= MAX_REMAINING_ERROR and within
        if explained and swapped.cost(limit) < (best[2].cost(limit) if best else before):
            best = first, second, swapped
    return best


def _likely_swaps(labelling: Labelling, shape: RobustShape) -> list[tuple[int, int]]:
    """List pairs of misplaced landmarks, those first that lie where the other one belongs.

    As they are fitted now: the fit is robust, and a swap hardly changes it. Each pair is fitted
    anew when it is tried, which takes too long for all those of many landmarks.
    """
    misplaced = labelling.misplaced(shape.limit_mm)
    fit, _ = fit_to(labelling.points[None], shape.points)
    (fitted,) = fit.apply(labelling.points[misplaced][None])
    apart = np.linalg.norm(fitted[:, None] - shape.points[misplaced], axis=2)
    first, second = np.triu_indices(len(misplaced), 1)
    swapped = apart[first, second] + apart[second, first]
    share = swapped / (apart[first, first] + apart[second, second])
    order = np.argsort(share, kind="stable")[:MAX_TRIED]
    pairs = np.stack([misplaced[first[order]], misplaced[second[order]]], axis=1)
    return [(one, other) for one, other in pairs.tolist()]


def _swap_sides(labelling: Labelling, shape: RobustShape) -> Labelling | None:
    """Swap the names of all left and right landmarks; None unless that explains the residuals."""
    if len(labelling.misplaced(shape.limit_mm)) < 4 or shape.partners is None:
        return None
    swapped = _relabel(labelling, shape.partners, shape)
    before, after = labelling.cost(shape.limit_mm), swapped.cost(shape.limit_mm)
    known = np.isfinite(swapped.residual_mm).sum() >= 0.5 * np.isfinite(labelling.residual_mm).sum()
    return swapped if known and after <= MAX_REMAINING_ERROR * before else None
