"""The JSON of an answer -> what is shown of each landmark, and back as a person corrected it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, Mapping, Tuple

from LandmarkdLib.service import ServiceError

SAME_MM = 1e-3
SAME_VOXELS = 0.1
"""A point that lies so close to where the network put it has not been moved: both must hold, as
voxels may be as small as a micrometre."""

Vector = Tuple[float, float, float]
JsonObject = Dict[str, Any]


@dataclass(frozen=True)
class ShownPoint:
    """A landmark as 3D Slicer shows it.

    Attributes:
        name: Label of the control point.
        ras_mm: Position in mm, RAS, which is Slicer's world; None where there is none.
        radius_mm: Radius of its 95 % region; None if it has none.
        description: Status, confidence and region in words, after the landmark's own description.
    """

    name: str
    ras_mm: Vector | None
    radius_mm: float | None
    description: str


def shown_points(answer: Mapping[str, Any]) -> list[ShownPoint]:
    """Return what is shown of an answer of ``POST /v1/landmarks``, in its order."""
    return [_shown(landmark) for landmark in answer["landmarks"]]


def summarise(answer: Mapping[str, Any]) -> str:
    """Say in a line what was found, and on further ones what was measured or warned of."""
    landmarks = answer["landmarks"]
    statuses = [landmark["status"] for landmark in landmarks]
    doubtful = statuses.count("low_confidence")
    line = f"{statuses.count('detected') + doubtful} of {len(landmarks)} landmarks found"
    if doubtful:
        line += f", {doubtful} of them doubtful"
    measured = [_describe(one) for one in answer["measurements"] if one["value"] is not None]
    return "\n".join([line, *measured, *answer["warnings"]])


@dataclass(frozen=True)
class PlacedPoint:
    """A control point as a person has left it.

    Attributes:
        name: Its label.
        ras_mm: Position in mm, RAS; None where it has none.
        missing: Whether it was marked as missing, which Slicer calls to skip it.
    """

    name: str
    ras_mm: Vector | None
    missing: bool = False


def correct(answer: Mapping[str, Any], points: Iterable[PlacedPoint]) -> JsonObject:
    """Correct an answer by the points that were shown of it.

    A point that was moved was placed by a person, and one that is marked as missing is absent. Of
    one without a position nothing is known. Nobody has judged the others, which count as right if
    they are detected.

    Args:
        answer: Of ``POST /v1/landmarks``.
        points: The control points; those that are not among them were deleted.

    Returns:
        The answer to send to ``POST /v1/cases``.

    Raises:
        ServiceError: A point is none of the answer's landmarks, or there are two of one.
    """
    by_name: dict[str, PlacedPoint] = {}
    known = {landmark["name"] for landmark in answer["landmarks"]}
    for point in points:
        if point.name not in known or point.name in by_name:
            raise ServiceError(
                f"expected the {len(known)} points of {answer['model']['name']} by their names, "
                f"each once; got one more, {point.name!r}"
            )
        by_name[point.name] = point
    affine = answer["volume"]["affine"][:3]
    same_mm = min(SAME_MM, SAME_VOXELS * min(answer["volume"]["spacing_mm"]))
    landmarks = [
        _corrected(one, by_name.get(one["name"], PlacedPoint(one["name"], None)), affine, same_mm)
        for one in answer["landmarks"]
    ]
    return {**answer, "landmarks": landmarks, "measurements": []}


def summarise_case(case: Mapping[str, Any]) -> str:
    """Say in a line what was kept."""
    return (
        f"kept by the service: {case['placed']} placed, {case['absent']} absent, "
        f"{case['unjudged']} not judged: right if detected"
    )


def _describe(measurement: Mapping[str, Any]) -> str:
    text = f"{measurement['name']}: {measurement['value']:.4g} {measurement['unit']}".rstrip()
    if measurement["interval95"] is None:
        return text
    low, high = measurement["interval95"]
    return f"{text} ({low:.4g} to {high:.4g})"


def _corrected(
    landmark: JsonObject, point: PlacedPoint, affine: list[list[float]], same_mm: float
) -> JsonObject:
    found, ras = landmark["ras_mm"], point.ras_mm
    if point.missing:
        return {**_unknown(landmark), "decided_by": "person"}
    if ras is None:
        return landmark if found is None else _unknown(landmark)
    if found is not None and max(abs(a - b) for a, b in zip(ras, found)) <= same_mm:
        return landmark
    return {
        **_unknown(landmark),
        "decided_by": "person",
        "status": "detected",
        "ijk": _solve([row[:3] for row in affine], [x - row[3] for x, row in zip(ras, affine)]),
        "ras_mm": list(ras),
        "lps_mm": [-ras[0], -ras[1], ras[2]],
    }


def _unknown(landmark: JsonObject) -> JsonObject:
    """Make a landmark of which nothing is known, or only what a person says."""
    kept = {"name": landmark["name"], "description": landmark["description"]}
    return {**dict.fromkeys(landmark), **kept, "status": "not_found", "decided_by": "network"}


def _solve(rows: list[list[float]], values: list[float]) -> list[float]:
    """Solve three linear equations, by Cramer's rule."""

    def determinant(m: list[list[float]]) -> float:
        (a, b, c), (d, e, f), (g, h, i) = m
        return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)

    replaced = [
        [[*row[:k], value, *row[k + 1 :]] for row, value in zip(rows, values)] for k in range(3)
    ]
    return [determinant(each) / determinant(rows) for each in replaced]


def _shown(landmark: Mapping[str, Any]) -> ShownPoint:
    words = [landmark["description"], landmark["status"].replace("_", " ")]
    if landmark["confidence"] is not None:
        words.append(f"confidence {landmark['confidence']:.2f}")
    position, radius = landmark["ras_mm"], landmark["region95_mm"]
    if position is None:
        radius = None
    if radius is not None:
        words.append(f"95 % within {radius:.3g} mm")
    return ShownPoint(
        name=landmark["name"],
        ras_mm=None if position is None else tuple(position),
        radius_mm=radius,
        description="; ".join(word for word in words if word),
    )
