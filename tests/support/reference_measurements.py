"""Landmarks -> measurements with their intervals, in NumPy float64: part of the reference.

Written from ``models/README.md``: errors of landmarks are normal, independent and alike in all
directions, and propagate to first order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.stats import chi, norm

from app.measurements import MeasurementSpec
from tests.support.oracle import Array

STEP_MM: Final = 1e-4
PLANES: Final = {"sagittal": (1, 2), "coronal": (0, 2), "axial": (0, 1)}


@dataclass(frozen=True, slots=True)
class ReferenceMeasurement:
    """A value, and the bounds of its 95 % interval; None where they are not known."""

    value: float | None
    interval95: tuple[float, float] | None


def measure(
    spec: MeasurementSpec,
    positions: Mapping[str, Array | None],
    regions: Mapping[str, float | None],
) -> ReferenceMeasurement:
    """Measure between landmarks, by name."""
    found = [positions[name] for name in spec.points]
    points = np.array([one for one in found if one is not None])
    if len(points) < len(found):
        return ReferenceMeasurement(None, None)
    value, radii = value_of(spec, points), [regions[name] for name in spec.points]
    known = [radius for radius in radii if radius is not None]
    if len(known) < len(radii):
        return ReferenceMeasurement(value, None)
    variance = 0.0
    for name in set(spec.points):
        rows = [row for row, other in enumerate(spec.points) if other == name]
        sigma = known[rows[0]] / chi.ppf(0.95, 3)
        for axis in range(3):
            ahead, behind = points.copy(), points.copy()
            ahead[rows, axis] += STEP_MM
            behind[rows, axis] -= STEP_MM
            change = value_of(spec, ahead) - value_of(spec, behind)
            if spec.kind == "angle":  # By the shorter way round.
                change = (change + 180) % 360 - 180
            variance += (sigma * change / (2 * STEP_MM)) ** 2
    sigma = spec.interval_scale * float(np.sqrt(variance))
    half, (least, most) = norm.ppf(0.975) * sigma, _ends(spec)
    lengths = {"distance": 3, "ratio": 3, "angle": 2, "plane_angle": 2, "line_distance": 2}
    dimensions = lengths.get(spec.kind, 0) - (spec.plane is not None)
    # A value that may be an end of its kind is the length of a vector of errors.
    for end in (least, most if spec.kind == "angle" else np.inf):
        if dimensions > 0 and abs(value - end) <= chi.ppf(0.95, dimensions) * sigma:
            half = max(half, abs(value - end))
    return ReferenceMeasurement(value, (max(value - half, least), min(value + half, most)))


def _ends(spec: MeasurementSpec) -> tuple[float, float]:
    if spec.kind == "projection" or (spec.kind == "angle" and spec.plane):
        return -np.inf, np.inf
    return 0.0, {"angle": 180.0, "plane_angle": 90.0}.get(spec.kind, np.inf)


def value_of(spec: MeasurementSpec, points: Array) -> float:
    """Compute a value in mm, degrees or none."""
    if spec.plane is not None:
        points = points[:, PLANES[spec.plane]]
    return FORMULAS[spec.kind](points)


def _cosine(first: Array, second: Array) -> float:
    return float(first @ second / np.sqrt((first @ first) * (second @ second)))


def _angle(p: Array) -> float:
    first, second = p[1] - p[0], p[3] - p[2]
    if p.shape[1] == 2:
        ends = [np.angle(complex(*one), deg=True) for one in (first, second)]
        return float((ends[1] - ends[0] + 180) % 360 - 180)
    return float(np.degrees(np.arccos(_cosine(first, second))))


def _plane_angle(p: Array) -> float:
    first, second = np.cross(p[1] - p[0], p[2] - p[0]), np.cross(p[4] - p[3], p[5] - p[3])
    return float(np.degrees(np.arccos(abs(_cosine(first, second)))))


def _line_distance(p: Array) -> float:
    line, off = p[2] - p[1], p[0] - p[1]
    return float(np.sqrt(off @ off * (1 - _cosine(line, off) ** 2)))


def _projection(p: Array) -> float:
    along, step = p[3] - p[2], p[1] - p[0]
    return float(np.sqrt(step @ step) * _cosine(step, along))


def _distance(p: Array) -> float:
    return float(np.sqrt(((p[1] - p[0]) ** 2).sum()))


FORMULAS: Final[Mapping[str, Callable[[Array], float]]] = {
    "distance": _distance,
    "angle": _angle,
    "plane_angle": _plane_angle,
    "line_distance": _line_distance,
    "projection": _projection,
    "ratio": lambda p: _distance(p[:2]) / _distance(p[2:]),
}
