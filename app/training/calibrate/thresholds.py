"""Masses of landmarks that are there and that are not -> presence thresholds.

The threshold of a landmark is the geometric middle between the mass that all but 2 % of its right
answers exceed and the mass that all but 2 % of the answers for it exceed not where it is absent. A
right answer is one within the voting radius of the truth. Absent is what lies further outside the
scan than that radius: nearer, the scan's own voxels vote for it, as they have learned to. A
landmark with at least 19 masses of both kinds gets a threshold of its own, the others share that of
all masses together: of fewer, one in fifty says nothing. Absence is never all seen, so the lower
mass counts as at least a sixteenth of the upper one: no threshold is below a quarter of what is
nearly always there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.training.evaluate.metrics import group
from app.training.evaluate.outcomes import Outcome

TAIL_PERCENT: Final = 2.0
LEAST_MASSES: Final = 19
SEEN_OF_ABSENCE: Final = 1 / 16


@dataclass(frozen=True, slots=True)
class Masses:
    """What the threshold of one landmark, or of all, is taken from.

    Attributes:
        present: Masses of right answers.
        absent: Masses where the landmark is not there, nor within the voting radius of the scan.
    """

    present: np.ndarray
    absent: np.ndarray

    def enough(self) -> bool:
        """Say whether they tell a threshold."""
        return min(len(self.present), len(self.absent)) >= LEAST_MASSES

    def bounds(self) -> tuple[float, float]:
        """Say which mass nearly all absent ones stay below, and nearly all present ones exceed."""
        lower = float(np.percentile(self.absent, 100 - TAIL_PERCENT))
        return lower, float(np.percentile(self.present, TAIL_PERCENT))

    def threshold(self) -> float:
        """Choose the threshold."""
        lower, upper = self.bounds()
        return math.sqrt(max(lower, SEEN_OF_ABSENCE * upper) * upper)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The presence thresholds of one network.

    Attributes:
        values: By landmark, in the model's order.
        own: How many landmarks have one of their own.
        masses: Of all landmarks.
    """

    values: tuple[float, ...]
    own: int
    masses: Masses


def masses_of(outcomes: Sequence[Outcome], radius_mm: float) -> Masses:
    """Sort the masses of outcomes.

    Args:
        outcomes: Of one network.
        radius_mm: Its voting radius: farther from the truth, an answer is another thing.

    Returns:
        The masses.
    """
    right = [outcome.mass for outcome in outcomes if outcome.error_mm <= radius_mm]
    gone = [
        outcome.mass
        for outcome in outcomes
        if outcome.known and not outcome.present and outcome.beyond_mm > radius_mm
    ]
    return Masses(np.array(right, dtype=np.float64), np.array(gone, dtype=np.float64))


def calibrate_thresholds(
    outcomes: Sequence[Outcome], names: Sequence[str], radius_mm: float
) -> Thresholds | None:
    """Choose the presence thresholds of one network.

    Args:
        outcomes: Its answers to scans that no weight was trained on, whole and cut.
        names: Of its landmarks.
        radius_mm: Its voting radius.

    Returns:
        The thresholds; None if even all masses together are too few.
    """
    together = masses_of(outcomes, radius_mm)
    if not together.enough():
        return None
    members = group(outcomes, lambda outcome: outcome.landmark)
    each = [masses_of(members.get(name, ()), radius_mm) for name in names]
    shared = together.threshold()
    return Thresholds(
        values=tuple(mine.threshold() if mine.enough() else shared for mine in each),
        own=sum(mine.enough() for mine in each),
        masses=together,
    )
