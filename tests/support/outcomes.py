"""Outcomes made by hand, for tests of what is made of them."""

import numpy as np

from app.io import Status
from app.training.evaluate.outcomes import Outcome
from app.voting import Landmark

NAN = float("nan")


def outcome(  # noqa: PLR0913 - each test says what matters to it
    error_mm: float = NAN,
    *,
    landmark: str = "a",
    scan: str = "one",
    present: bool = True,
    status: Status = "detected",
    mass: float = 0.8,
    region95_mm: float | None = None,
    known: bool = True,
    inside_mm: float = 10.0,
    from_shape_mm: float | None = None,
    spread_mm: float | None = None,
    warnings: tuple[str, ...] = (),
) -> Outcome:
    """Make an outcome placed ``error_mm`` from the truth, in a scan with voxels of 0.5 mm."""
    placed = np.isfinite(error_mm)
    return Outcome(
        scan=scan,
        landmark=landmark,
        present=present,
        status=status,
        true_mm=np.array([1.0, 2.0, 3.0]) if present else None,
        found_mm=np.array([1.0 + error_mm, 2.0, 3.0]) if placed else None,
        error_mm=error_mm,
        error_voxels=2 * error_mm,
        confidence=0.9,
        mass=mass,
        coherence=0.7,
        region95_mm=region95_mm,
        known=known,
        inside_mm=inside_mm if placed else NAN,
        from_shape_mm=from_shape_mm,
        spread_mm=spread_mm,
        warnings=warnings,
    )


def landmark(name: str, ras_mm: tuple[float, float, float] | None) -> Landmark:
    """Make a landmark that is detected at a position, or not found, in a scan of 1 mm voxels."""
    point = None if ras_mm is None else np.array(ras_mm)
    return Landmark(
        name=name,
        description="",
        status="not_found" if point is None else "detected",
        ijk=point,
        ras_mm=point,
        confidence=0.9,
        mass=0.8,
        coherence=0.7,
        spread_mm=0.5,
        region95_mm=None,
        disagreement_mm=0.1,
        expected_ras_mm=None,
        candidates=(),
    )
