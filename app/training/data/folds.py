"""specimens -> Folds: who is left out together, so that everybody is judged by models of others."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from app.errors import BadParameter, StartupError
from app.training.data.issues import listed
from app.training.data.split import check_train_only
from app.training.data.summary import Facts

FOLDS: Final = "folds"
"""Folder within a model's that holds its folds, each a model folder."""

FILE: Final = "folds.json"

SIDE: Final = re.compile(r"[-_. ](left|right|l|r)$", re.IGNORECASE)
"""End of a scan's name that says which side of a subject it shows."""


@dataclass(frozen=True, slots=True)
class Folds:
    """Who is left out together.

    Attributes:
        seed: What the choice depends on, beside the names.
        members: Names of the scans of each fold. Each is in one, but those that are only learned
            from are in none.
        subjects: Whom each scan shows; all scans of a subject are in one fold.
        digests: SHA-256 of each scan's voxels, affine and landmarks, hex.
    """

    seed: int
    members: tuple[tuple[str, ...], ...]
    subjects: Mapping[str, str]
    digests: Mapping[str, str]

    def of_scans(self) -> dict[str, str]:
        """Give the fold of each scan, as tables name it."""
        return {
            name: str(number)
            for number, names in enumerate(self.members, start=1)
            for name in names
        }

    def of_subjects(self) -> dict[str, str]:
        """Say whom each scan shows that some fold is judged by."""
        return {name: self.subjects[name] for names in self.members for name in names}

    def without(self, number: int) -> frozenset[str]:
        """Name the scans that the model of a fold must not see: all that show its subjects."""
        theirs = {self.subjects[name] for name in self.members[number - 1]}
        return frozenset(name for name, subject in self.subjects.items() if subject in theirs)

    def folder(self, model: Path, number: int) -> Path:
        """Say where the model of a fold lies; the first fold is 1."""
        return model / FOLDS / f"fold-{number}"


def make_folds(
    specimens: Sequence[Facts],
    count: int,
    seed: int,
    pattern: str | None = None,
    train_only: Sequence[str] = (),
) -> Folds:
    """Decide who is left out together: folds as equal as can be, the same for the same scans.

    Args:
        specimens: All there are.
        count: How many folds.
        seed: Chooses among the ways to do it.
        pattern: Regular expression of the part of a scan's name that says whom it shows; None: the
            name without a side at its end, such as ``_left``.
        train_only: Names of scans that are in no fold, as they are only learned from.

    Returns:
        The folds.

    Raises:
        BadParameter: There cannot be so many, or a name does not match the pattern, or none of the
            specimens has one of those that are only learned from.
    """
    check_train_only(specimens, train_only)
    subjects = {facts.name: subject_of(facts.name, pattern) for facts in specimens}
    judged = {name: subject for name, subject in subjects.items() if name not in train_only}
    groups: dict[str, list[str]] = {}
    for name, subject in sorted(judged.items()):
        groups.setdefault(subject, []).append(name)
    if not 2 <= count <= len(groups):
        scans = "" if len(groups) == len(judged) else f" in {len(judged)} scans"
        raise BadParameter(
            f"--folds: expected 2 to {len(groups)}, as there are {len(groups)} subjects{scans}, "
            f"got {count}"
        )
    folds: list[list[str]] = [[] for _ in range(count)]

    def order(subject: str) -> tuple[int, bytes]:
        mixed = hashlib.sha256(f"{seed} {subject}".encode()).digest()
        return -len(groups[subject]), mixed

    for subject in sorted(groups, key=order):
        min(folds, key=len).extend(groups[subject])
    members = tuple(tuple(sorted(fold)) for fold in folds)
    return Folds(seed, members, subjects, digests_of(specimens))


def subject_of(name: str, pattern: str | None) -> str:
    """Say whom a scan shows.

    Raises:
        BadParameter: The pattern is none, or not found in the name.
    """
    if pattern is None:
        return SIDE.sub("", name)
    try:
        found = re.search(pattern, name)
    except re.error as error:
        raise BadParameter(
            f"--subject: expected a regular expression, got {pattern}: {error}"
        ) from None
    if found is None:
        raise BadParameter(f"--subject: expected {pattern} in the name of every scan, got {name}")
    return (found[1] if found.re.groups else None) or found[0]


def digests_of(specimens: Sequence[Facts]) -> dict[str, str]:
    """Hash each scan with its landmarks, to see later whether anything has changed."""
    digests = {}
    for facts in specimens:
        places = {name: np.round(point, 3).tolist() for name, point in facts.points.items()}
        content = [facts.digest, np.round(facts.affine, 6).tolist(), sorted(places.items())]
        digests[facts.name] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return digests


def begin_folds(model: Path, folds: Folds) -> None:
    """Keep who is left out together, or check that it is the same if a model has folds already.

    Raises:
        StartupError: The model has other folds, or of other data.
    """
    path = model / FOLDS / FILE
    before = read_folds(model)
    if before is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Folds may be begun by several processes at once.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(folds), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        return
    check_same_data(model, before, folds.digests)
    if before.members != folds.members:
        raise StartupError(
            f"{path} has other folds ({len(before.members)} of seed {before.seed}) than were asked "
            f"for ({len(folds.members)} of seed {folds.seed}). To go on, repeat the command that "
            f"began it; to begin anew, delete {path.parent}"
        )


def check_same_data(model: Path, folds: Folds, digests: Mapping[str, str]) -> None:
    """Check that the scans and landmarks are those that a model's folds were begun with.

    Raises:
        StartupError: They are not; the first of them are named.
    """
    changes = (
        ("new", digests.keys() - folds.digests.keys()),
        ("gone", folds.digests.keys() - digests.keys()),
        ("changed", {name for name in digests if folds.digests.get(name) != digests[name]}),
    )
    told = [f"{word}: {listed(sorted(names))}" for word, names in changes if names]
    if told:
        raise StartupError(
            f"expected the data that {model / FOLDS / FILE} was begun with, got others "
            f"({'; '.join(told)}); to begin anew, delete {model / FOLDS}"
        )


def read_folds(model: Path) -> Folds | None:
    """Read the folds of a model; None if it has none."""
    path = model / FOLDS / FILE
    if not path.exists():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    members = tuple(tuple(names) for names in table["members"])
    return Folds(table["seed"], members, table["subjects"], table["digests"])


def unlearnt(folds: Folds, specimens: Sequence[Facts]) -> list[str]:
    """List the landmarks that a fold is judged by and that its model has never seen."""
    where: dict[str, set[str]] = {}
    for facts in specimens:
        for label in facts.points:
            where.setdefault(label, set()).add(facts.name)
    tests = [(folds.without(number), names) for number, names in enumerate(folds.members, start=1)]
    return [
        label
        for label, names in where.items()
        if any(names <= hidden and not names.isdisjoint(judged) for hidden, judged in tests)
    ]
