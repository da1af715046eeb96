"""Answers of the service, as a test wants them."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from app.geometry import LPS_FROM_RAS, transform
from app.io import LandmarksAnswer

UNKNOWN: Final = (
    "confidence", "mass", "coherence", "spread_mm", "region95_mm", "disagreement_mm"
)  # fmt: skip
"""What nobody knows of a landmark that a person has placed."""


def place_by_hand(answer: dict[str, Any], number: int, ijk: Sequence[float]) -> None:
    """Move a landmark in the JSON of an answer, as the page does for a person."""
    ras = transform(np.array(answer["volume"]["affine"]), np.array(ijk, dtype=float))
    answer["landmarks"][number].update(
        dict.fromkeys(UNKNOWN),
        decided_by="person",
        status="detected",
        ijk=list(ijk),
        ras_mm=ras.tolist(),
        lps_mm=transform(LPS_FROM_RAS, ras).tolist(),
    )


def make_answer(
    names: Sequence[str], points: np.ndarray, regions: Sequence[float | None] | None = None
) -> LandmarksAnswer:
    """Make an answer of landmarks in mm, RAS, NaN where missing, and their 95 % regions in mm."""
    unknown = (
        "confidence", "mass", "coherence", "spread_mm", "disagreement_mm", "expected_ras_mm",
        "candidates",
    )  # fmt: skip
    stages = ("receive", "decode", "prepare", "queue", "network", "vote", "locate", "total")
    landmarks = []
    for name, point, region in zip(names, points, regions or [None] * len(names), strict=True):
        found = bool(np.isfinite(point).all())
        positions = {
            "ijk": point.tolist(),
            "ras_mm": point.tolist(),
            "lps_mm": transform(LPS_FROM_RAS, point).tolist(),
        }
        landmarks.append(
            {
                "name": name,
                "description": "",
                "status": "detected" if found else "not_found",
                "region95_mm": region,
            }
            | dict.fromkeys(unknown)
            | (positions if found else dict.fromkeys(positions))
        )
    volume = {
        "shape": (9, 9, 9),
        "spacing_mm": (1, 1, 1),
        "orientation": "RAS",
        "affine": np.eye(4).tolist(),
        "digest": "",
    }
    document = {
        "request_id": "",
        "model": {"name": "m", "version": "1", "digest": ""},
        "volume": volume,
        "landmarks": landmarks,
        "warnings": [],
        "timing_ms": dict.fromkeys(stages, 0.0),
    }
    return LandmarksAnswer.model_validate(document)
