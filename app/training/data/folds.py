"""Folds of a cross-validation: which specimens are held out together, kept in ``folds.json``."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import TypeAdapter

from app.durable import replacing
from app.errors import BadParameter, StartupError
from app.training.data.issues import shorten
from app.training.data.split import check_train_only, subject_of
from app.training.data.summary import SpecimenSummary
from app.training.files import FOLDS, refuse_damaged

FILE: Final = "folds.json"


@dataclass(frozen=True, slots=True)
class Folds:
    """Which scans are held out together.

    Attributes:
        seed: Random seed of the assignment.
        members: Names of the scans of each fold. Each scan is in one fold, except those that are
            only trained on, which are in none.
        subjects: The subject that each scan shows; all scans of a subject are in one fold.
        digests: SHA-256 of each scan's voxels, affine and landmarks, hex.
    """

    seed: int
    members: tuple[tuple[str, ...], ...]
    subjects: Mapping[str, str]
    digests: Mapping[str, str]

    def by_scan(self) -> dict[str, str]:
        """Return the number of each scan's fold, as tables show it."""
        return {
            name: str(number)
            for number, names in enumerate(self.members, start=1)
            for name in names
        }

    def held_out_subjects(self) -> dict[str, str]:
        """Return the subject of each scan that is in a fold."""
        return {name: self.subjects[name] for names in self.members for name in names}

    def excluded(self, number: int) -> frozenset[str]:
        """Name the scans that a fold's model is not trained on: all that show its subjects."""
        subjects = {self.subjects[name] for name in self.members[number - 1]}
        return frozenset(name for name, subject in self.subjects.items() if subject in subjects)

    def folder(self, model: Path, number: int) -> Path:
        """Return the model folder of a fold; the first fold is 1."""
        return model / FOLDS / f"fold-{number}"


def make_folds(
    specimens: Sequence[SpecimenSummary],
    count: int,
    seed: int,
    pattern: str | None = None,
    train_only: Sequence[str] = (),
) -> Folds:
    """Assign specimens to folds of nearly equal size, always the same for the same scans.

    All scans of a subject are in one fold; see ``subject_of`` for the pattern. Those of
    ``train_only`` are in none.

    Raises:
        BadParameter: There are too few subjects, a name does not match the pattern, or a name of
            ``train_only`` is unknown.
    """
    check_train_only(specimens, train_only)
    subjects = {specimen.name: subject_of(specimen.name, pattern) for specimen in specimens}
    candidates = {name: subject for name, subject in subjects.items() if name not in train_only}
    groups: dict[str, list[str]] = {}
    for name, subject in sorted(candidates.items()):
        groups.setdefault(subject, []).append(name)
    if len(groups) < 2:
        raise BadParameter(f"--folds: expected scans of 2 subjects or more, got {len(groups)}")
    if not 2 <= count <= len(groups):
        scans = "" if len(groups) == len(candidates) else f" in {len(candidates)} scans"
        raise BadParameter(
            f"--folds: expected 2 to {len(groups)}, as there are {len(groups)} subjects{scans}, "
            f"got {count}"
        )
    folds: list[list[str]] = [[] for _ in range(count)]

    def order(subject: str) -> tuple[int, bytes]:
        shuffled = hashlib.sha256(f"{seed} {subject}".encode()).digest()
        return -len(groups[subject]), shuffled

    for subject in sorted(groups, key=order):
        min(folds, key=len).extend(groups[subject])
    members = tuple(tuple(sorted(fold)) for fold in folds)
    return Folds(seed, members, subjects, content_digests(specimens))


def subject_as_known(scan: str, folds: Folds | None) -> str:
    """Return the subject that a scan shows: as folds know it, or by its name."""
    known = folds.subjects if folds else {}
    return known.get(scan) or subject_of(scan)


def content_digests(specimens: Sequence[SpecimenSummary]) -> dict[str, str]:
    """Hash each scan with its landmarks, to detect later whether anything has changed."""
    digests = {}
    for specimen in specimens:
        decimals = specimen.decimals
        positions = dict.fromkeys(specimen.absent) | {
            name: np.round(point, decimals).tolist() for name, point in specimen.points.items()
        }
        affine = np.round(specimen.affine, 3 + decimals).tolist()
        content = [specimen.digest, affine, sorted(positions.items())]
        digests[specimen.name] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return digests


def save_folds(model: Path, folds: Folds) -> None:
    """Write the folds of a model, or check that they are the same if it has folds already.

    Raises:
        StartupError: The model has other folds, or of other data.
    """
    path = model / FOLDS / FILE
    before = read_folds(model)
    if before is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps(asdict(folds), indent=1) + "\n", encoding="utf-8")
        return
    check_same_data(model, before, folds.digests)
    if before.members != folds.members:
        raise StartupError(
            f"{path} has other folds ({len(before.members)} of seed {before.seed}) than were asked "
            f"for ({len(folds.members)} of seed {folds.seed}). To resume, repeat the command that "
            f"started it; to start again, delete {path.parent}"
        )


def check_same_data(model: Path, folds: Folds, digests: Mapping[str, str]) -> None:
    """Check that the scans and landmarks are those that a model's folds were made of.

    Raises:
        StartupError: They are not; the first of them are named.
    """
    changes = (
        ("new", digests.keys() - folds.digests.keys()),
        ("gone", folds.digests.keys() - digests.keys()),
        ("changed", {name for name in digests if folds.digests.get(name) != digests[name]}),
    )
    differences = [f"{word}: {shorten(sorted(names))}" for word, names in changes if names]
    if differences:
        raise StartupError(
            f"expected the data that {model / FOLDS / FILE} was made of, got others "
            f"({'; '.join(differences)}); to start again, delete {model / FOLDS}"
        )


def read_folds(model: Path) -> Folds | None:
    """Read the folds of a model; None if it has none.

    Raises:
        StartupError: They are damaged.
    """
    path = model / FOLDS / FILE
    if not path.exists():
        return None
    with refuse_damaged(path):
        return TypeAdapter(Folds).validate_json(path.read_bytes())


def untrained_landmarks(folds: Folds, specimens: Sequence[SpecimenSummary]) -> list[str]:
    """List the landmarks that a fold is measured on although its model is not trained on them."""
    scans_of: dict[str, set[str]] = {}
    for specimen in specimens:
        for label in specimen.points:
            scans_of.setdefault(label, set()).add(specimen.name)
    tests = [(folds.excluded(number), names) for number, names in enumerate(folds.members, start=1)]
    return [
        label
        for label, names in scans_of.items()
        if any(names <= excluded and not names.isdisjoint(test) for excluded, test in tests)
    ]
