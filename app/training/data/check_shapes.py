"""Check of constellations: misplaced and swapped landmarks, odd sizes and odd poses."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from app.shapes import SCALE_BOUNDS, Labelling, RobustShape, find_swaps
from app.training.data.issues import Issue, shorten
from app.training.data.summary import SpecimenSummary

MAX_POSE_ANGLE_DEG: Final = 40.0
"""Poses within this angle count as the same: subjects are scanned one way, but never exactly."""

MIN_COMMON_POSE: Final = 0.7
"""Share of the scans in one pose from which the others are outliers."""

HALF_TURN: Final = np.diag([-1.0, -1.0, 1.0])
"""What confusing LPS and RAS does to points; around the origin they stay inside the scan."""


def check_shapes(
    specimens: Sequence[SpecimenSummary], names: Sequence[str], shape: RobustShape | None
) -> list[Issue]:
    """Find misplaced landmarks, swapped names, odd sizes and odd poses.

    Args:
        specimens: Those whose landmarks lie in their scans.
        names: Landmark names, in the order of the shape.
        shape: The robust shape; without a consistent one nothing is checked.
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
    suspicions = find_swaps(labelling, shape)
    issues = [Issue("warning", scan, message) for message in suspicions.describe(names)]
    labelling, given = suspicions.labelling, suspicions.given
    misplaced = labelling.misplaced(limit)
    known = np.isfinite(labelling.residual_mm)
    if 2 * len(misplaced) > known.sum():
        message = f"{len(misplaced)} of {known.sum()} landmarks lie unlike those of the other scans"
        return [*issues, Issue("warning", scan, message)]
    residual = labelling.residual_mm
    worst = sorted(misplaced.tolist(), key=lambda index: -residual[index] / limit[index])
    if worst:
        listed = shorten([f"{names[given[index]]} ({residual[index]:.3g} mm)" for index in worst])
        message = f"far from where the other landmarks and scans predict them: {listed}"
        issues.append(Issue("warning", scan, message))
    return issues


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
