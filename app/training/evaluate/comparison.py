"""Two versions of a model + held-out cases -> Comparison: which is better, if that can be told."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.io import read_placed
from app.model import read_manifest
from app.training.data.specimens import SpecimenFiles
from app.training.data.split import subject_of
from app.training.evaluate.digits import format_number
from app.training.evaluate.metrics import group
from app.training.evaluate.outcomes import Outcome
from app.training.evaluate.spread import mean_interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two versions of a model on held-out cases.

    Attributes:
        versions: Their numbers, the old one first.
        losses_mm: Mean losses of the cases, of both.
        low_mm: Lower bound of the 95 % interval of how much smaller those of the second are, by
            Student's t over cases.
        high_mm: Its upper bound.
        cases: Number of cases; all scans of one subject, or frames of one file, are one.
    """

    versions: tuple[str, str]
    losses_mm: tuple[float, float]
    low_mm: float
    high_mm: float
    cases: int

    @property
    def is_better(self) -> bool:
        """Whether the second version is better, by Student's t over cases."""
        return self.low_mm > 0

    def describe(self) -> str:
        """Describe the comparison in a sentence."""
        before, after = self.losses_mm
        bounds, word = (self.low_mm, self.high_mm), "better"
        if after > before:
            bounds, word = (-self.high_mm, -self.low_mm), "worse"
        return (
            f"On {self.cases} held-out cases, version {self.versions[0]} is "
            f"{format_number(before)} mm off and {self.versions[1]} {format_number(after)} mm: "
            f"{word} by {format_number(abs(before - after))} mm, 95 % interval "
            f"{format_number(bounds[0])} to {format_number(bounds[1])} mm"
        )


def compare_versions(
    before: Path,
    after: Path,
    held_out: Sequence[SpecimenFiles],
    kept: Collection[str],
    outcomes: tuple[Sequence[Outcome], Sequence[Outcome]],
) -> Comparison:
    """Compare two versions of a model on cases that neither was trained on.

    People have corrected those whose names are in ``kept``.
    """
    manifests = [read_manifest(folder) for folder in (before, after)]
    voxel_mm = min(read_manifest(before / manifests[0].folders[-1]).input.spacing_mm)
    radius_mm = manifests[0].voting.radius_mm
    version = manifests[0].version
    placed = {
        files.name: read_placed(files.landmarks, version)
        for files in held_out
        if files.name in kept
    }
    losses = [case_losses(some, radius_mm) for some in counted(*outcomes, placed, voxel_mm)]
    return compare_losses(losses[0], losses[1], (version, manifests[1].version))


def counted(
    before: Sequence[Outcome],
    after: Sequence[Outcome],
    kept: Mapping[str, Collection[str] | None],
    voxel_mm: float,
) -> tuple[list[Outcome], list[Outcome]]:
    """Take from each of two versions' outcomes what favours the next one only if it is better.

    Where nobody has moved a point of a kept case, the answer of the version in place stands for the
    truth, and that of the next one is as wrong as it lies apart from it. By the triangle inequality
    its true error is larger by no more than that, whatever a person has let pass: the gain that is
    measured is never more than the true one. It would be if small errors were forgiven on such
    points alone: those that were moved are the ones that the version in place has put wrong, and
    another one, equally exact, is seldom as wrong there. Yet every small move would count against
    the next version. So answers within a voxel of each other count alike, on all points: whether
    they are is symmetrical in the versions, and of two equally exact ones it favours neither.

    Of a case that an earlier version answered, only those points count that a person has placed:
    the others are answers of that version, from which the next one may have learned.

    Landmarks that were marked as absent do not count in kept cases, as nobody marks those of which
    the version in place has rightly said nothing.

    Args:
        before: Of the version in place.
        after: Of the next one, on the same scans.
        kept: Scans that people have corrected, with the names of the points that count; None: all
            count. All is known of other scans.
        voxel_mm: Of the finest grid.
    """
    olds, news = [], []
    for old, new in zip(before, after, strict=True):
        if old.scan not in kept:
            olds.append(old)
            news.append(new)
        elif old.present and ((names := kept[old.scan]) is None or old.landmark in names):
            olds.append(old)
            news.append(old if _apart_mm(old, new) <= voxel_mm else new)
    return olds, news


def case_losses(outcomes: Sequence[Outcome], radius_mm: float) -> np.ndarray:
    """Average what a model is off in each case.

    The error of a point counts up to the voting radius, which stands for a missed or invented point
    as well.

    Returns:
        Mean loss of each subject, in mm.
    """

    def loss(one: Outcome) -> float:
        if not one.present:
            return radius_mm if one.status == "detected" else 0.0
        return float(np.nan_to_num(one.error_mm, nan=radius_mm).clip(max=radius_mm))

    known = group([one for one in outcomes if one.known], lambda one: subject_of(one.scan))
    return np.array([np.mean([loss(one) for one in members]) for members in known.values()])


def compare_losses(before: np.ndarray, after: np.ndarray, versions: tuple[str, str]) -> Comparison:
    """Compare two versions by the losses of each on the same cases, in mm."""
    low, high = mean_interval(before - after)
    means = [float(some.mean()) if some.size else math.nan for some in (before, after)]
    return Comparison(versions, (means[0], means[1]), low, high, len(before))


def _apart_mm(old: Outcome, new: Outcome) -> float:
    """Return how far apart the answers of two versions are; infinite if only one has a position."""
    if old.found_mm is None or new.found_mm is None:
        return 0.0 if old.found_mm is new.found_mm else np.inf
    return float(np.linalg.norm(new.found_mm - old.found_mm))
