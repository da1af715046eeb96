"""Facts -> findings: do the landmarks of each scan lie as those of the other scans do?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Int64

from app.geometry import Points
from app.training.data.issues import Finding, listed
from app.training.data.robust_shape import Typical, fit_to, residuals
from app.training.data.summary import Facts
from app.training.data.symmetry import find_partners
from app.voting import SCALE_BOUNDS

MOST_SWAPS: Final = 6
"""Exchanged pairs looked for in one scan; where more seem to be, all of its names are in doubt."""

MUCH: Final = 1 / 3
"""An exchange explains two misplaced landmarks if it leaves at most this share of their errors."""

NEAR_DEG: Final = 40.0
"""Poses this near to each other are alike: people lie down one way, though never quite."""

ALIKE: Final = 0.7
"""Share of the scans that lie alike from which those that do not are odd."""

HALF_TURN: Final = np.diag([-1.0, -1.0, 1.0])
"""What taking LPS for RAS does to points, which a volume around the origin does not notice."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One scan's landmarks, in an order of names that may be wrong.

    Attributes:
        points: Their places in mm; NaN where there is none.
        residual_mm: How far each lies from where the typical shape has it.
    """

    points: Points
    residual_mm: np.ndarray

    def cost(self, limit_mm: np.ndarray) -> float:
        """Sum how far all are off, in limits; one that is very far off counts as three."""
        return float(np.nansum(np.minimum(self.residual_mm / limit_mm, 3.0)))

    def misplaced(self, limit_mm: np.ndarray) -> Int64[np.ndarray, " n"]:
        """List the landmarks that are out of place."""
        return np.flatnonzero(self.residual_mm > limit_mm)


def check_shapes(
    specimens: Sequence[Facts], names: Sequence[str], typical: Typical | None
) -> list[Finding]:
    """Find landmarks out of place, exchanged names, odd sizes and odd poses.

    Args:
        specimens: Those whose points lie in their scans.
        names: Of the landmarks, in the order of the typical constellation.
        typical: The constellation; None, or one that is loose, tells nothing.

    Returns:
        What was found.
    """
    if typical is None or typical.loose:
        return []
    findings: list[Finding] = []
    for row in np.flatnonzero(typical.usable).tolist():
        facts = specimens[row]
        suspect = Suspect(facts.rows(names), typical.residual_mm[row])
        findings += _misplaced(facts.name, suspect, names, typical)
    return findings + _sizes(specimens, typical) + _poses(specimens, typical)


def _misplaced(
    scan: str, suspect: Suspect, names: Sequence[str], typical: Typical
) -> list[Finding]:
    """Say which names look exchanged, and which landmarks are out of place all the same."""
    limit = typical.limit_mm
    findings: list[Finding] = []
    sides = _other_sides(suspect, typical)
    if sides is not None:
        suspect = sides
        findings.append(Finding("warning", scan, "the names of left and right look exchanged"))
    for _ in range(MOST_SWAPS):
        swap = _best_swap(suspect, typical)
        if swap is None:
            break
        first, second, suspect = swap
        what = f"landmarks {names[first]} and {names[second]} look swapped"
        findings.append(Finding("warning", scan, what))
    bad = suspect.misplaced(limit)
    known = np.isfinite(suspect.residual_mm)
    if 2 * len(bad) > known.sum():
        what = f"{len(bad)} of {known.sum()} landmarks lie unlike those of the other scans"
        return [*findings, Finding("warning", scan, what)]
    worst = sorted(bad.tolist(), key=lambda mark: -suspect.residual_mm[mark] / limit[mark])
    if worst:
        marks = listed([f"{names[at]} ({suspect.residual_mm[at]:.3g} mm)" for at in worst])
        what = f"far from where the other landmarks and scans let them be expected: {marks}"
        findings.append(Finding("warning", scan, what))
    return findings


def _renamed(suspect: Suspect, order: np.ndarray, typical: Typical) -> Suspect:
    """Give each landmark the place of another; -1 in the order: it has none."""
    points = np.where((order >= 0)[:, None], suspect.points[order], np.nan)
    fit, usable = fit_to(points[None], typical.shape)
    if not usable[0]:
        return replace(suspect, residual_mm=np.full(len(points), np.inf))
    return Suspect(points, residuals(points[None], typical.shape, fit)[0])


def _best_swap(suspect: Suspect, typical: Typical) -> tuple[int, int, Suspect] | None:
    """Find the two landmarks whose exchange puts both in place, if there are such."""
    limit = typical.limit_mm
    bad = suspect.misplaced(limit)
    before = suspect.cost(limit)
    best: tuple[int, int, Suspect] | None = None
    for first, second in ((a, b) for at, a in enumerate(bad) for b in bad[at + 1 :]):
        order = np.arange(len(limit))
        order[[first, second]] = second, first
        tried = _renamed(suspect, order, typical)
        pair = [first, second]
        left = tried.residual_mm[pair].sum() / suspect.residual_mm[pair].sum()
        explained = left <= MUCH and (tried.residual_mm[pair] <= limit[pair]).all()
        if explained and tried.cost(limit) < (best[2].cost(limit) if best else before):
            best = int(first), int(second), tried
    return best


def _other_sides(suspect: Suspect, typical: Typical) -> Suspect | None:
    """Exchange the names of all left and right landmarks, and keep that if it explains much."""
    if len(suspect.misplaced(typical.limit_mm)) < 4:
        return None
    partners = find_partners(typical.shape)
    if partners is None:
        return None
    tried = _renamed(suspect, partners, typical)
    before, after = suspect.cost(typical.limit_mm), tried.cost(typical.limit_mm)
    known = np.isfinite(tried.residual_mm).sum() >= 0.5 * np.isfinite(suspect.residual_mm).sum()
    return tried if known and after <= MUCH * before else None


def _sizes(specimens: Sequence[Facts], typical: Typical) -> list[Finding]:
    """Find scans whose subject is of quite another size than the others."""
    usable = np.flatnonzero(typical.usable).tolist()
    sizes = 1 / typical.fits.scale[usable]
    relative = sizes / np.median(sizes)
    return [
        Finding(
            "warning",
            specimens[row].name,
            f"the landmarks lie {size:.3g} times as far apart as in the other scans: "
            "is the unit of length right?",
        )
        for row, size in zip(usable, relative, strict=True)
        if not SCALE_BOUNDS[0] <= size <= SCALE_BOUNDS[1]
    ]


def _poses(specimens: Sequence[Facts], typical: Typical) -> list[Finding]:
    """Where nearly all subjects lie alike, find those that LPS and RAS mixed up would turn."""
    usable = np.flatnonzero(typical.usable).tolist()
    turns = typical.fits.rotation[usable]
    alike = np.array([[_apart_deg(a, b) <= NEAR_DEG for b in turns] for a in turns])
    usual = turns[alike.sum(axis=1).argmax()]
    if alike.mean(axis=1).max() < ALIKE:
        return []
    return [
        Finding(
            "warning",
            specimens[row].name,
            "the subject is turned by half a turn about the z axis against the others: "
            "LPS and RAS may be mixed up",
        )
        for row, turn in zip(usable, turns, strict=True)
        if _apart_deg(turn, usual @ HALF_TURN) <= NEAR_DEG
    ]


def _apart_deg(one: np.ndarray, other: np.ndarray) -> float:
    """Measure the angle between two rotations."""
    cosine = (np.trace(one @ other.T) - 1) / 2
    return float(np.rad2deg(np.arccos(np.clip(cosine, -1, 1))))
