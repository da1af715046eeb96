"""Facts -> findings: are the points where their scan is, and if not, which frame are they in?

Points in a wrong frame are the commonest fault of such data. Each known mix-up is tried: one that
puts all points into their scan is named.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from app.geometry import Affine, Points, scaling, spacing_of, transform
from app.io import declared_frame
from app.training.data.issues import Finding, Severity, listed
from app.training.data.specimens import inside_volume
from app.training.data.summary import Facts

FEW: Final = 0.1
"""Up to this share of the scans (or one of at least three), what differs is odd, not a custom."""

FLAT: Final = 3.0
"""Longest over shortest edge of a voxel from which a scan is called anisotropic."""

POINT: Final = 0.01
"""Landmarks that spread by less than this share of their scan's diagonal were scaled wrongly."""

Correction = Callable[[Points, Facts], Points]


def _signs(x: float, y: float, z: float) -> Correction:
    return lambda points, _: points * (x, y, z)


def _from_index(points: Points, facts: Facts) -> Points:
    return transform(facts.affine, points)


def _from_index_of_one(points: Points, facts: Facts) -> Points:
    return transform(facts.affine, points - 1)


def _from_corner(points: Points, facts: Facts) -> Points:
    return transform(facts.affine, points / spacing_of(facts.affine))


def _times(factor: float) -> Correction:
    return lambda points, _: points * factor


MIX_UPS: Final[Mapping[str, Correction]] = {
    "they look like {other} written as {declared}": _signs(-1, -1, 1),
    "they look like voxel indices (i, j, k) instead of mm": _from_index,
    "they look like voxel indices counted from 1 instead of mm": _from_index_of_one,
    "they look like mm from the first voxel, without the scan's origin and axes": _from_corner,
    "they look like metres instead of mm": _times(1e3),
    "they look like centimetres instead of mm": _times(10.0),
    "they look like microns instead of mm": _times(1e-3),
    "the sign of x looks wrong": _signs(-1, 1, 1),
    "the sign of y looks wrong": _signs(1, -1, 1),
    "the sign of z looks wrong": _signs(1, 1, -1),
}
"""What the points may be instead, likeliest first, and what would put them right."""


def check_frames(specimens: Sequence[Facts]) -> list[Finding]:
    """Find points outside their scans, and scans whose axes or voxels are unlike the others'.

    Args:
        specimens: All that can be read.

    Returns:
        What was found.
    """
    findings = [finding for facts in specimens for finding in _outside(facts)]
    findings += _odd(
        [facts.name for facts in specimens],
        [bool(np.linalg.det(facts.affine[:3, :3]) < 0) for facts in specimens],
        "the scan's axes are left-handed, which is legal (a mirrored scan looks the same)",
        "the scan's axes are left-handed, those of the others are not: was it mirrored?",
    )
    ratios = [float(np.ptp(np.log(spacing_of(facts.affine)))) for facts in specimens]
    findings += _odd(
        [facts.name for facts in specimens],
        [bool(ratio > np.log(FLAT)) for ratio in ratios],
        f"voxels are over {FLAT:g} times as long as wide: places along them are known less well",
        f"voxels are over {FLAT:g} times as long as wide, those of the others are not",
    )
    return findings


def explain(facts: Facts) -> str:
    """Name the mix-up that would put all points of a scan inside it; empty if none does."""
    for words, correct in MIX_UPS.items():
        points = correct(facts.placed, facts)
        if _is_a_point(points, facts):
            continue
        if inside_volume(points, facts.affine, facts.shape).all():
            declared = declared_frame(facts.landmarks)
            other = "RAS" if declared == "LPS" else "LPS"
            named = words.format(declared=declared, other=other)
            return f"{named}, which would put all of them inside"
    return ""


def _is_a_point(points: Points, facts: Facts) -> bool:
    """Say whether several points would lie in next to one place, which fits into any scan."""
    spread = np.linalg.norm(np.ptp(points, axis=0))
    return len(points) > 1 and bool(spread < POINT * np.linalg.norm(facts.extent_mm))


def _outside(facts: Facts) -> list[Finding]:
    """Say which points lie outside their scan, how far, and why."""
    names = facts.outside
    if not names:
        return []
    total = len(facts.points)
    which = "all points" if len(names) == total else f"{len(names)} of {total} points"
    reason = explain(facts)
    if not reason:
        far = _farthest_mm(facts.placed, facts.affine, facts.shape)
        reason = f"by up to {far:.3g} mm ({listed(names)}); do both files belong to one scan?"
    return [Finding("error", facts.name, f"{which} outside the scan: {reason}")]


def _farthest_mm(points: Points, affine: Affine, shape: Sequence[int]) -> float:
    """Measure how far outside a scan the farthest point lies."""
    index = transform(np.linalg.inv(affine), points)
    beyond = index - np.clip(index, -0.5, np.asarray(shape) - 0.5)
    return float(np.linalg.norm(transform(scaling(spacing_of(affine)), beyond), axis=1).max())


def _odd(names: Sequence[str], flags: Sequence[bool], custom: str, odd: str) -> list[Finding]:
    """Note what many scans have, and warn of it where only few do."""
    marked = [name for name, flag in zip(names, flags, strict=True) if flag]
    few = len(names) >= 3 and len(marked) <= max(1, FEW * len(names))
    severity: Severity = "warning" if few else "note"
    return [Finding(severity, name, odd if few else custom) for name in marked]
