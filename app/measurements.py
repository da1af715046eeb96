"""Landmarks -> measurements between them, each with an interval.

The error of a landmark is taken as normal, alike in all directions and independent of the others'.
Its standard deviation follows from the calibrated 95 % region: 95 % of such errors lie within 2.80
standard deviations, the root of the quantile of chi square with three degrees of freedom. Errors
propagate through a measurement to first order, with derivatives by differences, and the manifest's
``interval_scale`` corrects the width by what held-out scans have shown.

Points that nearly coincide, lines that are nearly parallel, or a point that is nearly on a line,
are an exception: the value is then the length of a small vector, which errors in several directions
make longer. Where that length may be 0, its interval reaches so far.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from jaxtyping import Float64
from pydantic import BaseModel, Field, model_validator

REGION95_SIGMAS: Final = 2.7955
ACROSS95_SIGMAS: Final = 2.4477
INTERVAL95_SIGMAS: Final = 1.95996
"""95 % regions and intervals in standard deviations, of three dimensions, of two and of one."""

LENGTH95_SIGMAS: Final = {3: REGION95_SIGMAS, 2: ACROSS95_SIGMAS, 1: INTERVAL95_SIGMAS}
"""The same by the number of dimensions."""

STEP: Final = 1e-3
"""Of the differences that approximate derivatives, in standard deviations of a coordinate: no one
length in mm is small beside a cell and a body."""

POINTS_OF: Final = {
    "distance": 2, "angle": 4, "plane_angle": 6, "line_distance": 3, "projection": 4, "ratio": 4,
}  # fmt: skip
"""Number of points of each kind of measurement."""

GREATEST: Final = {"angle": 180.0, "plane_angle": 90.0}
"""Value of each kind that has one, in degrees."""

Point = Float64[np.ndarray, " 3"]
Corners = Float64[np.ndarray, "n axes"]


class MeasurementSpec(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """One measurement that a model names, in a section ``[[measurements]]``."""

    name: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=128)]
    description: str = ""
    kind: Literal["distance", "angle", "plane_angle", "line_distance", "projection", "ratio"]
    points: tuple[str, ...]
    plane: Literal["sagittal", "coronal", "axial"] | None = None
    interval_scale: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0

    @model_validator(mode="after")
    def _check_points(self) -> "MeasurementSpec":
        count = POINTS_OF[self.kind]
        if len(self.points) != count:
            raise ValueError(f"expected {count} points for {self.kind}, got {len(self.points)}")
        if self.kind == "plane_angle" and self.plane is not None:
            raise ValueError("expected no plane with plane_angle: its points span two")
        return self

    @property
    def unit(self) -> Literal["mm", "deg", ""]:
        """Of its value; a ratio has none."""
        return "deg" if "angle" in self.kind else "" if self.kind == "ratio" else "mm"

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and greatest value that there is, in its unit; infinite where it is signed."""
        is_signed = self.kind == "projection" or (self.kind == "angle" and self.plane is not None)
        return (-np.inf, np.inf) if is_signed else (0.0, GREATEST.get(self.kind, np.inf))

    def difference(self, value: float, other: float) -> float:
        """Subtract two of its values; angles by the shorter way round."""
        difference = value - other
        return (difference + 180.0) % 360.0 - 180.0 if self.unit == "deg" else difference


def check_names(specs: Sequence[MeasurementSpec], landmarks: Collection[str]) -> None:
    """Check that measurements have names of their own, and are between known landmarks.

    Raises:
        ValueError: They are not.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError("expected every name of a measurement once")
    for spec in specs:
        unknown = [name for name in spec.points if name not in landmarks]
        if unknown:
            raise ValueError(
                f"measurement {spec.name!r}: expected names of landmarks, got {unknown[0]!r}"
            )


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement of one scan.

    Attributes:
        spec: What is measured.
        value: In the unit of its kind; None where a point is missing.
        half_width: Of the 95 % interval around the value; None where a point has no region.
        reason: Why value or interval are None; empty if neither is.
    """

    spec: MeasurementSpec
    value: float | None
    half_width: float | None
    reason: str = ""

    @property
    def interval95(self) -> tuple[float, float] | None:
        """Bounds of the interval, cut off where no value of its kind lies; None: there is none."""
        if self.value is None or self.half_width is None:
            return None
        least, most = self.spec.bounds
        return max(self.value - self.half_width, least), min(self.value + self.half_width, most)


def measure_landmarks(
    specs: Sequence[MeasurementSpec],
    positions: Mapping[str, Point | None],
    regions: Mapping[str, float | None],
    doubtful: Collection[str] = (),
) -> tuple[Measurement, ...]:
    """Measure between the landmarks of one scan.

    Args:
        specs: What to measure.
        positions: Of the landmarks in mm, RAS, by name; None where not found.
        regions: Radius of each one's 95 % region in mm; None where unknown.
        doubtful: Names of landmarks whose position is doubtful, of which none has a region.
    """
    return tuple(_measure(spec, positions, regions, doubtful) for spec in specs)


def _measure(
    spec: MeasurementSpec,
    positions: Mapping[str, Point | None],
    regions: Mapping[str, float | None],
    doubtful: Collection[str],
) -> Measurement:
    found = [positions.get(name) for name in spec.points]
    missing = [name for name, point in zip(spec.points, found, strict=True) if point is None]
    if missing:
        return Measurement(spec, None, None, f"not found: {_listed(missing)}")
    points = np.array(found, dtype=np.float64)
    value = _evaluate(spec, points)
    if value is None:
        return Measurement(spec, None, None, "points that span a line or a plane coincide")
    if doubted := [name for name in spec.points if name in doubtful]:
        return Measurement(spec, value, None, f"low confidence: {_listed(doubted)}")
    unsure = [name for name in spec.points if regions.get(name) is None]
    if unsure:
        return Measurement(spec, value, None, f"without a 95 % region: {_listed(unsure)}")
    square = 0.0
    for name in dict.fromkeys(spec.points):
        rows = [row for row, other in enumerate(spec.points) if other == name]
        sigma = (regions[name] or 0.0) / REGION95_SIGMAS
        square += sum(
            _propagate(spec, points, value, rows, error) ** 2 for error in sigma * np.eye(3)
        )
    sigma = spec.interval_scale * float(np.sqrt(square))
    half_width = INTERVAL95_SIGMAS * sigma
    dimensions, ends = ENDS.get(spec.kind, (1, ()))
    for end in ends:
        # A plane leaves one less; where that is one, the interval reaches so far anyway.
        sigmas = LENGTH95_SIGMAS[dimensions - (spec.plane is not None)]
        if (length := abs(value - end)) <= sigmas * sigma:
            half_width = max(half_width, length)
    return Measurement(spec, value, half_width)


def _propagate(
    spec: MeasurementSpec, points: Corners, value: float, rows: list[int], error_mm: Point
) -> float:
    """Propagate an error of one landmark, which may be several of the points.

    Returns:
        By how much the value is wrong, to first order; where its derivative jumps, as at exactly
        parallel lines, by that to one side. It is so in both directions across, while next to such
        lines only one counts: exactly there, the interval is 1.4 times as wide, and 1.7 times where
        two points coincide.
    """
    step = np.zeros_like(points)
    step[rows] = STEP * error_mm
    ends = _evaluate(spec, points + step), _evaluate(spec, points - step)
    moves = (abs(spec.difference(end, value)) / STEP for end in ends if end is not None)
    return max(moves, default=0.0)


def _evaluate(spec: MeasurementSpec, points: Corners) -> float | None:
    """Compute a value; None where it is not defined."""
    if spec.plane is not None:
        points = points[:, PLANES[spec.plane]]
    with np.errstate(all="ignore"):
        value = float(FORMULAS[spec.kind](points))
    return value if np.isfinite(value) else None


def _distance(points: Corners) -> float:
    return float(np.linalg.norm(points[1] - points[0]))


def _angle(points: Corners) -> float:
    """Angle from line a b to line c d: signed in a plane, else from 0 to 180 degrees."""
    first, second = points[1] - points[0], points[3] - points[2]
    if not (first.any() and second.any()):
        return np.nan
    if points.shape[1] == 2:
        cross = first[0] * second[1] - first[1] * second[0]
    else:
        cross = np.linalg.norm(np.cross(first, second))
    return float(np.degrees(np.arctan2(cross, first @ second)))


def _plane_angle(points: Corners) -> float:
    """Angle between the planes a b c and d e f, from 0 to 90 degrees."""
    first, second = (np.cross(p[1] - p[0], p[2] - p[0]) for p in (points[:3], points[3:]))
    if not (first.any() and second.any()):
        return np.nan
    cross = np.linalg.norm(np.cross(first, second))
    return float(np.degrees(np.arctan2(cross, abs(first @ second))))


def _line_distance(points: Corners) -> float:
    """Distance of point a from line b c."""
    along = points[2] - points[1]
    along = along / np.linalg.norm(along)
    off = points[0] - points[1]
    return float(np.linalg.norm(off - (off @ along) * along))


def _projection(points: Corners) -> float:
    """Distance from a to b along the direction from c to d; negative against it."""
    along = points[3] - points[2]
    return float((points[1] - points[0]) @ along / np.linalg.norm(along))


def _ratio(points: Corners) -> float:
    """Distance a b over distance c d."""
    length = np.linalg.norm(points[3] - points[2])
    return float(np.linalg.norm(points[1] - points[0]) / length)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


PLANES: Final[Mapping[Literal["sagittal", "coronal", "axial"], list[int]]] = {
    "sagittal": [1, 2],
    "coronal": [0, 2],
    "axial": [0, 1],
}
"""Axes of the patient, in RAS, onto which points are projected."""

ENDS: Final[Mapping[str, tuple[int, tuple[float, ...]]]] = {
    "distance": (3, (0.0,)),
    "ratio": (3, (0.0,)),
    "angle": (2, (0.0, 180.0)),
    "plane_angle": (2, (0.0,)),
    "line_distance": (2, (0.0,)),
}
"""Values beyond which there are none, as the length of a vector is 0 there; before them the
dimensions of that vector in space."""

FORMULAS: Final[Mapping[str, Callable[[Corners], float]]] = {
    "distance": _distance,
    "angle": _angle,
    "plane_angle": _plane_angle,
    "line_distance": _line_distance,
    "projection": _projection,
    "ratio": _ratio,
}
