"""Check of constellations: misplaced and swapped landmarks, odd sizes and odd poses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Int64

from app.geometry import Points
from app.training.data.issues import Issue, shorten
from app.training.data.robust_shape import RobustShape, fit_to, residuals
from app.training.data.summary import SpecimenSummary
from app.training.data.symmetry import find_partners
from app.voting import SCALE_BOUNDS

MAX_SWAPS: Final = 6
"""Swapped pairs searched for in one scan; with more, all of its names are in doubt."""

MAX_REMAINING_ERROR: Final = 1 / 3
"""A swap explains two misplaced landmarks if it leaves at most this share of their errors."""

MAX_POSE_ANGLE_DEG: Final = 40.0
"""Poses within this angle count as the same: subjects are scanned one way, but never exactly."""

MIN_COMMON_POSE: Final = 0.7
"""Share of the scans in one pose from which the others are outliers."""

HALF_TURN: Final = np.diag([-1.0, -1.0, 1.0])
"""What confusing LPS and RAS does to points; around the origin they stay inside the scan."""


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


def check_shapes(
    specimens: Sequence[SpecimenSummary], names: Sequence[str], shape: RobustShape | None
) -> list[Issue]:
    """Find misplaced landmarks, swapped names, odd sizes and odd poses.

    Args:
        specimens: Those whose landmarks lie in their scans.
        names: Landmark names, in the order of the shape.
        shape: The robust shape; without a consistent one nothing is checked.

    Returns:
        The issues.
    """
    if shape is None or not shape.consistent:
        return []
    issues: list[Issue] = []
    for row in np.flatnonzero(shape.usable).tolist():
        specimen = specimens[row]
        labelling = Labelling(specimen.rows(names), shape.residual_mm[row])
        issues += _check_positions(specimen.name, labelling, names, shape)
    return issues + _check_sizes(specimens, shape) + _check_poses(specimens, shape)


def _check_positions(
    scan: str, labelling: Labelling, names: Sequence[str], shape: RobustShape
) -> list[Issue]:
    """Report names that look swapped, and landmarks that are misplaced even so."""
    limit = shape.limit_mm
    issues: list[Issue] = []
    mirrored = _swap_sides(labelling, shape)
    if mirrored is not None:
        labelling = mirrored
        issues.append(Issue("warning", scan, "the names of left and right look exchanged"))
    for _ in range(MAX_SWAPS):
        swap = _best_swap(labelling, shape)
        if swap is None:
            break
        first, second, labelling = swap
        message = f"landmarks {names[first]} and {names[second]} look swapped"
        issues.append(Issue("warning", scan, message))
    misplaced = labelling.misplaced(limit)
    known = np.isfinite(labelling.residual_mm)
    if 2 * len(misplaced) > known.sum():
        message = f"{len(misplaced)} of {known.sum()} landmarks lie unlike those of the other scans"
        return [*issues, Issue("warning", scan, message)]
    residual = labelling.residual_mm
    worst = sorted(misplaced.tolist(), key=lambda index: -residual[index] / limit[index])
    if worst:
        listed = shorten([f"{names[index]} ({residual[index]:.3g} mm)" for index in worst])
        message = f"far from where the other landmarks and scans predict them: {listed}"
        issues.append(Issue("warning", scan, message))
    return issues


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
    misplaced = labelling.misplaced(limit)
    before = labelling.cost(limit)
    best: tuple[int, int, Labelling] | None = None
    for first, second in ((a, b) for n, a in enumerate(misplaced) for b in misplaced[n + 1 :]):
        order = np.arange(len(limit))
        order[[first, second]] = second, first
        swapped = _relabel(labelling, order, shape)
        pair = [first, second]
        remaining = swapped.residual_mm[pair].sum() / labelling.residual_mm[pair].sum()
        within = bool((swapped.residual_mm[pair] <= limit[pair]).all())
        explained = remaining <= MAX_REMAINING_ERROR and within
        if explained and swapped.cost(limit) < (best[2].cost(limit) if best else before):
            best = int(first), int(second), swapped
    return best


def _swap_sides(labelling: Labelling, shape: RobustShape) -> Labelling | None:
    """Swap the names of all left and right landmarks; None unless that explains the residuals."""
    if len(labelling.misplaced(shape.limit_mm)) < 4:
        return None
    partners = find_partners(shape.points)
    if partners is None:
        return None
    swapped = _relabel(labelling, partners, shape)
    before, after = labelling.cost(shape.limit_mm), swapped.cost(shape.limit_mm)
    known = np.isfinite(swapped.residual_mm).sum() >= 0.5 * np.isfinite(labelling.residual_mm).sum()
    return swapped if known and after <= MAX_REMAINING_ERROR * before else None


def _check_sizes(specimens: Sequence[SpecimenSummary], shape: RobustShape) -> list[Issue]:
    """Find scans whose subject is far larger or smaller than the others."""
    usable = np.flatnonzero(shape.usable).tolist()
    sizes = 1 / shape.fits.scale[usable]
    relative = sizes / np.median(sizes)
    return [
        Issue(
            "warning",
            specimens[row].name,
            f"the landmarks lie {size:.3g} times as far apart as in the other scans: "
            "is the unit of length right?",
        )
        for row, size in zip(usable, relative, strict=True)
        if not SCALE_BOUNDS[0] <= size <= SCALE_BOUNDS[1]
    ]


def _check_poses(specimens: Sequence[SpecimenSummary], shape: RobustShape) -> list[Issue]:
    """Where nearly all subjects share a pose, find those that are turned as LPS for RAS would."""
    usable = np.flatnonzero(shape.usable).tolist()
    rotations = shape.fits.rotation[usable]
    close = np.array(
        [[_angle_deg(a, b) <= MAX_POSE_ANGLE_DEG for b in rotations] for a in rotations]
    )
    common = rotations[close.sum(axis=1).argmax()]
    if close.mean(axis=1).max() < MIN_COMMON_POSE:
        return []
    return [
        Issue(
            "warning",
            specimens[row].name,
            "the subject is turned by half a turn about the z axis against the others: "
            "LPS and RAS may be mixed up",
        )
        for row, rotation in zip(usable, rotations, strict=True)
        if _angle_deg(rotation, common @ HALF_TURN) <= MAX_POSE_ANGLE_DEG
    ]


def _angle_deg(one: np.ndarray, other: np.ndarray) -> float:
    """Measure the angle between two rotations."""
    cosine = (np.trace(one @ other.T) - 1) / 2
    return float(np.rad2deg(np.arccos(np.clip(cosine, -1, 1))))
