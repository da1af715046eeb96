"""Heatmaps + Votes -> Landmarks: where they are, whether they are there, and how sure that is."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float64
import numpy as np

Status = Literal["detected", "low_confidence", "not_found", "out_of_field"]
Point = Float64[np.ndarray, " 3"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mode of a landmark's votes.

    Attributes:
        ijk: In voxels of the uploaded array.
        ras_mm: In mm, RAS.
        mass: Vote weight within the read-out radius, per voxel that could have voted.
    """

    ijk: Point
    ras_mm: Point
    mass: float


@dataclass(frozen=True, slots=True)
class Landmark:
    """One landmark of one scan. Fields that cannot be known are None; a missing landmark has no place.

    Attributes:
        name: As in the manifest.
        description: As in the manifest.
        status: Whether it was found.
        ijk: In voxels of the uploaded array; None unless detected or low_confidence.
        ras_mm: In mm, RAS; likewise.
        confidence: In [0, 1]: 0.5 at the presence threshold, monotone in mass and coherence.
        mass: See 'Presence' in ``app.landmarks``.
        coherence: Share of the landmark's vote weight that lies within the read-out radius.
        spread_mm: Root mean square distance of the votes within the radius from the estimate. Spread,
            not an error bar.
        region95_mm: Radius that held 95 % of held-out errors; None if the model is uncalibrated.
        disagreement_mm: Distance between the estimate and the centroid of the probabilities.
        expected_ras_mm: Where the fitted constellation expects it, when that differs from the answer
            by more than its tolerance or no mode agrees; None otherwise.
        candidates: All modes, best first.
    """

    name: str
    description: str
    status: Status
    ijk: Point | None
    ras_mm: Point | None
    confidence: float
    mass: float
    coherence: float
    spread_mm: float | None
    region95_mm: float | None
    disagreement_mm: float | None
    expected_ras_mm: Point | None
    candidates: tuple[Candidate, ...]
