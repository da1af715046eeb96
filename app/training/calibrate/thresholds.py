"""Masses of present and absent landmarks -> presence thresholds.

The threshold of a landmark is the geometric mean of two masses: the 2nd percentile of its correct
answers, and the 98th percentile of the answers where it is absent. A correct answer is one within
the voting radius of the truth. Absent means further outside the scan than that radius: nearer, the
scan's own voxels vote for it, as they are trained to. A landmark with at least 19 masses of both
kinds gets a threshold of its own, the others share that of all masses pooled. The samples of
absence are never complete, so the lower mass counts as at least a sixteenth of the upper one: no
threshold is below a quarter of what nearly all correct answers exceed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from app.model import LoadedModel
from app.training.evaluate.metrics import group
from app.training.evaluate.outcomes import Outcome

TAIL_PERCENT: Final = 2.0
MIN_MASSES: Final = 19
MIN_ABSENT_SHARE: Final = 1 / 16


@dataclass(frozen=True, slots=True)
class Masses:
    """Masses of one landmark, or of all, from which a threshold is computed.

    Attributes:
        present: Masses of correct answers.
        absent: Masses where the landmark is absent, and not within the voting radius of the scan.
    """

    present: np.ndarray
    absent: np.ndarray

    def suffice(self) -> bool:
        """Return whether there are enough for a threshold."""
        return min(len(self.present), len(self.absent)) >= MIN_MASSES

    def bounds(self) -> tuple[float, float]:
        """Return what nearly all absent masses stay below, and nearly all present ones exceed."""
        lower = float(np.percentile(self.absent, 100 - TAIL_PERCENT))
        return lower, float(np.percentile(self.present, TAIL_PERCENT))

    def threshold(self) -> float:
        """Compute the threshold."""
        lower, upper = self.bounds()
        return math.sqrt(max(lower, MIN_ABSENT_SHARE * upper) * upper)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The presence thresholds of one network.

    Attributes:
        values: By landmark, in the model's order.
        own: Number of landmarks with a threshold of their own.
        masses: Of all landmarks.
    """

    values: tuple[float, ...]
    own: int
    masses: Masses


def masses_of(outcomes: Sequence[Outcome], radius_mm: float) -> Masses:
    """Collect the masses of outcomes of one network.

    An answer further from the truth than the network's voting radius is not correct.
    """
    correct = [outcome.mass for outcome in outcomes if outcome.error_mm <= radius_mm]
    absent = [
        outcome.mass
        for outcome in outcomes
        if outcome.known and not outcome.present and outcome.beyond_mm > radius_mm
    ]
    return Masses(np.array(correct, dtype=np.float64), np.array(absent, dtype=np.float64))


def calibrate_thresholds(
    outcomes: Sequence[Outcome], names: Sequence[str], radius_mm: float
) -> Thresholds | None:
    """Choose the presence thresholds of one network, by scans that it was not trained on.

    Returns:
        The thresholds; None if all masses together are too few.
    """
    pooled = masses_of(outcomes, radius_mm)
    if not pooled.suffice():
        return None
    members = group(outcomes, lambda outcome: outcome.landmark)
    by_landmark = [masses_of(members.get(name, ()), radius_mm) for name in names]
    shared = pooled.threshold()
    return Thresholds(
        values=tuple(one.threshold() if one.suffice() else shared for one in by_landmark),
        own=sum(one.suffice() for one in by_landmark),
        masses=pooled,
    )


def with_thresholds(
    model: LoadedModel, thresholds: Sequence[Sequence[float] | None]
) -> LoadedModel:
    """Give a model other presence thresholds by landmark, in memory.

    They are those of its network, and of its second one if it has one; None: it keeps its own.
    """
    refine = model.refine
    if refine is not None:
        refine = with_thresholds(refine, thresholds[1:])
    if thresholds[0] is None:
        return replace(model, refine=refine)
    landmarks = tuple(
        landmark.model_copy(update={"presence_threshold": threshold})
        for landmark, threshold in zip(model.manifest.landmarks, thresholds[0], strict=True)
    )
    manifest = model.manifest.model_copy(update={"landmarks": landmarks})
    return replace(model, manifest=manifest, refine=refine)
