"""The JSON of an answer -> what is shown of each landmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping


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
    ras_mm: tuple[float, float, float] | None
    radius_mm: float | None
    description: str


def shown_points(answer: Mapping[str, Any]) -> list[ShownPoint]:
    """Return what is shown of an answer of ``POST /v1/landmarks``, in its order."""
    return [_shown(landmark) for landmark in answer["landmarks"]]


def summarise(answer: Mapping[str, Any]) -> str:
    """Say in a line what was found, and on further ones what the service warned of."""
    landmarks = answer["landmarks"]
    statuses = [landmark["status"] for landmark in landmarks]
    doubtful = statuses.count("low_confidence")
    line = f"{statuses.count('detected') + doubtful} of {len(landmarks)} landmarks found"
    if doubtful:
        line += f", {doubtful} of them doubtful"
    return "\n".join([line, *answer["warnings"]])


def _shown(landmark: Mapping[str, Any]) -> ShownPoint:
    words = [landmark["description"], landmark["status"].replace("_", " ")]
    if landmark["confidence"] is not None:
        words.append(f"confidence {landmark['confidence']:.2f}")
    position, radius = landmark["ras_mm"], landmark["region95_mm"]
    if position is None:
        radius = None
    if radius is not None:
        words.append(f"95 % within {radius:.2f} mm")
    return ShownPoint(
        name=landmark["name"],
        ras_mm=None if position is None else tuple(position),
        radius_mm=radius,
        description="; ".join(word for word in words if word),
    )
