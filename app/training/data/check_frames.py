"""Check of coordinate frames: landmarks outside their scan, odd axes and odd voxels.

Points in a wrong frame are the commonest error in such data. Each known mistake is undone in turn;
one whose correction brings all points into their scan is named.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from app.errors import BadParameter
from app.geometry import (
    LPS_FROM_RAS,
    Affine,
    Points,
    distance_beyond,
    spacing_of,
    transform,
)
from app.io import RasPoint, Volume, declared_frame, read_file, read_truth, read_volume
from app.training.data.issues import Issue, Severity, shorten
from app.training.data.specimens import SpecimenFiles
from app.training.data.summary import SpecimenSummary

MAX_OUTLIER_SHARE: Final = 0.1
"""A property of at most this share of the scans (or of one of at least three) is an outlier; of
more scans, it is how the data are."""

MAX_ANISOTROPY: Final = 3.0
"""Longest over shortest edge of a voxel from which a scan counts as anisotropic."""

MIN_SPREAD: Final = 0.01
"""Landmarks that spread by less than this share of their scan's diagonal were scaled wrongly."""

MIN_INDEX_SPREAD: Final = 0.5
"""The same of voxel indices, where some points lie inside as they are read: a part of a scan shows
few of its landmarks, and their coordinates in mm, taken for indices, would fill a corner of it."""

Correction = Callable[[Points, Points, Affine], Points]
"""Points as they were read, in RAS; as they are written; affine of the scan -> points in RAS."""


def _times(*factors: float) -> Correction:
    return lambda points, _written, _affine: points * factors


def _from_index(_: Points, written: Points, affine: Affine) -> Points:
    return transform(affine, written)


def _from_one_based_index(_: Points, written: Points, affine: Affine) -> Points:
    return transform(affine, written - 1)


def _from_corner(_: Points, written: Points, affine: Affine) -> Points:
    return transform(affine, written / spacing_of(affine))


CORRECTIONS: Final[Mapping[str, Correction]] = {
    "they look like {other} written as {declared}": _times(-1, -1, 1),
    "they look like voxel indices (i, j, k) instead of mm": _from_index,
    "they look like voxel indices counted from 1 instead of mm": _from_one_based_index,
    "they look like mm from the first voxel, without the scan's origin and axes": _from_corner,
    "they look like metres instead of mm": _times(1e3),
    "they look like centimetres instead of mm": _times(10.0),
    "they look like microns instead of mm": _times(1e-3),
    "the sign of x looks wrong": _times(-1, 1, 1),
    "the sign of y looks wrong": _times(1, -1, 1),
    "the sign of z looks wrong": _times(1, 1, -1),
}
"""Known mistakes, likeliest first, and what corrects each."""

INDICES: Final = (_from_index, _from_one_based_index)


def check_frames(specimens: Sequence[SpecimenSummary]) -> list[Issue]:
    """Find landmarks outside their scans, and scans of other axes or voxels than the others."""
    issues = [
        Issue("error", specimen.name, message)
        for specimen in specimens
        if (message := _describe_outside(specimen))
    ]
    names = [specimen.name for specimen in specimens]
    issues += _check_outliers(
        names,
        [bool(np.linalg.det(specimen.affine[:3, :3]) < 0) for specimen in specimens],
        "the scan's axes are left-handed, which is legal (a mirrored scan looks the same)",
        "the scan's axes are left-handed, those of the others are not: was it mirrored?",
    )
    ratios = [float(np.ptp(np.log(spacing_of(specimen.affine)))) for specimen in specimens]
    issues += _check_outliers(
        names,
        [bool(ratio > np.log(MAX_ANISOTROPY)) for ratio in ratios],
        f"voxels are over {MAX_ANISOTROPY:g} times as long as wide: positions along them are "
        "less accurate",
        f"voxels are over {MAX_ANISOTROPY:g} times as long as wide, those of the others are not",
    )
    return issues


def read_in_frame(files: SpecimenFiles) -> tuple[Volume, dict[str, RasPoint | None]]:
    """Read a scan and its landmarks to measure a model with, unless these are in another frame.

    A few points outside the scan are allowed, as a part of a scan does not show them.

    Raises:
        LandmarkdError: One of the files cannot be read, or all points lie outside of the scan, or
            some do for a reason that is known.
    """
    volume = read_volume(read_file(files.scan))
    try:
        truth = read_truth(files.landmarks)
    except ValueError as error:
        raise BadParameter(str(error)) from error
    points = np.array([point for point in truth.values() if point is not None]).reshape(-1, 3)
    affine, shape = volume.affine, volume.voxels.shape
    outside = int((distance_beyond(points, affine, shape) != 0).sum())
    reason = _explain_outside(points, affine, shape, files.landmarks) if outside else ""
    if reason or 0 < outside == len(points):
        raise BadParameter(
            f"expected the landmarks of {files.landmarks.name} inside their scan, got {outside} of "
            f"{len(points)} outside: {reason or 'do both files belong to one scan?'}"
        )
    return volume, truth


def _explain_outside(
    points: Points, affine: Affine, shape: tuple[int, ...], landmarks: Path
) -> str:
    """Name the mistake whose correction brings all points into the scan; empty if none does."""
    declared = declared_frame(landmarks)
    # An index has no frame: whatever the file declares, its numbers are meant as they stand there.
    written = transform(LPS_FROM_RAS, points) if declared == "LPS" else points
    outside = float((distance_beyond(points, affine, shape) != 0).mean())
    for words, correct in CORRECTIONS.items():
        corrected = correct(points, written, affine)
        if _is_collapsed(corrected, affine, shape, _least_spread(correct, outside)):
            continue
        if (distance_beyond(corrected, affine, shape) == 0).all():
            other = "RAS" if declared == "LPS" else "LPS"
            mistake = words.format(declared=declared, other=other)
            return f"{mistake}, which would put all of them inside"
    return ""


def _least_spread(correct: Correction, outside: float) -> float:
    """Return the least share of a scan's diagonal that its landmarks spread over once corrected.

    Args:
        correct: The correction.
        outside: Share of the points that lie outside as they are read. If it is no more than half,
            they are no indices: infinite.
    """
    if correct not in INDICES or outside == 1:
        return MIN_SPREAD
    return MIN_INDEX_SPREAD if outside > 0.5 else np.inf


def _is_collapsed(points: Points, affine: Affine, shape: tuple[int, ...], least: float) -> bool:
    """Return whether several points would lie at almost one position, which fits into any scan."""
    spread = np.linalg.norm(np.ptp(points, axis=0))
    diagonal = np.linalg.norm(shape * spacing_of(affine))
    return len(points) > 1 and bool(spread < least * diagonal)


def _describe_outside(specimen: SpecimenSummary) -> str:
    """Describe which points lie outside their scan, how far, and the likely mistake."""
    names, affine, shape = specimen.outside, specimen.affine, specimen.shape
    if not names:
        return ""
    total = len(specimen.points)
    which = "all points" if len(names) == total else f"{len(names)} of {total} points"
    reason = _explain_outside(specimen.positions, affine, shape, specimen.files.landmarks)
    if not reason:
        far = distance_beyond(specimen.positions, affine, shape).max()
        reason = f"by up to {far:.3g} mm ({shorten(names)}); do both files belong to one scan?"
    return f"{which} outside the scan: {reason}"


def _check_outliers(
    names: Sequence[str], flags: Sequence[bool], common: str, outlier: str
) -> list[Issue]:
    """Note a property that many scans have, or warn of it where only a few have it."""
    flagged = [name for name, flag in zip(names, flags, strict=True) if flag]
    few = len(names) >= 3 and len(flagged) <= max(1, MAX_OUTLIER_SHARE * len(names))
    severity: Severity = "warning" if few else "note"
    return [Issue(severity, name, outlier if few else common) for name in flagged]
