"""Which specimens are trained on, and which are held out for validation."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.errors import BadParameter
from app.training.data.issues import shorten
from app.training.data.summary import SpecimenSummary

HELD_OUT_FRACTION: Final = 5
"""One in so many scans is held out."""

MAX_HELD_OUT: Final = 5
"""More would add little information, and every validation takes time for each."""

PART: Final = re.compile(r"([-_. ](left|right|l|r))?(-frame\d+)?$", re.IGNORECASE)
"""End of a scan's name that says which side of a subject it shows, and which frame of a file."""


@dataclass(frozen=True, slots=True)
class Split:
    """Training and held-out specimens."""

    train: tuple[SpecimenSummary, ...]
    held_out: tuple[SpecimenSummary, ...]
    reason: str


def split(
    specimens: Sequence[SpecimenSummary],
    names: Sequence[str] | None,
    reason: str = "",
    train_only: Sequence[str] = (),
    subject: str | None = None,
) -> Split:
    """Split specimens into training and held out.

    Args:
        specimens: All specimens.
        names: Names of those to hold out; None: choose a fifth, at least one and at most five, and
            always the same of the same scans.
        reason: Why the named ones are held out.
        train_only: Names of those that are never held out.
        subject: As for ``subject_of``: scans of one subject are held out together.

    Raises:
        BadParameter: A name is unknown or in both lists, or nothing is left to train on.
    """
    known = {specimen.name for specimen in specimens}
    unknown = set(names or ()) - known
    if unknown:
        raise BadParameter(
            f"--validate: expected names of scans, found none named {shorten(sorted(unknown))}; "
            f"there are {shorten(sorted(known))}"
        )
    check_train_only(specimens, train_only)
    both = set(names or ()) & set(train_only)
    if both:
        raise BadParameter(
            f"--train-only: expected none that are held out, got {shorten(sorted(both))}"
        )
    if names is None:
        names = choose_held_out(specimens, train_only, subject)
        reason = (
            f"about one in {HELD_OUT_FRACTION}, always the same ones; --validate NAME,NAME or none"
        )
    train = tuple(specimen for specimen in specimens if specimen.name not in names)
    held_out = tuple(specimen for specimen in specimens if specimen.name in names)
    if not train:
        raise BadParameter("--validate: expected scans to be left to learn from, got none")
    return Split(train, held_out, reason)


def check_train_only(specimens: Sequence[SpecimenSummary], train_only: Sequence[str]) -> None:
    """Check that the names given by ``--train-only`` exist.

    Raises:
        BadParameter: One does not.
    """
    unknown = set(train_only) - {specimen.name for specimen in specimens}
    if unknown:
        raise BadParameter(
            f"--train-only: expected names of scans, found none named {shorten(sorted(unknown))}"
        )


def choose_held_out(
    specimens: Sequence[SpecimenSummary],
    train_only: Sequence[str] = (),
    subject: str | None = None,
) -> tuple[str, ...]:
    """Choose which specimens to hold out, by a hash of the subject: new scans change few of them.

    All scans of a subject are held out, or none is: one that has more than there are to hold out,
    only where no other can be. One that alone has some landmark is trained on.
    """
    trained = {subject_of(name, subject) for name in train_only}
    groups: dict[str, list[SpecimenSummary]] = {}
    for specimen in specimens:
        groups.setdefault(subject_of(specimen.name, subject), []).append(specimen)
    candidates = {name: group for name, group in groups.items() if name not in trained}
    scans = sum(map(len, candidates.values()))
    count = min(max(round(scans / HELD_OUT_FRACTION), 1), MAX_HELD_OUT)
    remaining = Counter(label for specimen in specimens for label in specimen.points)
    chosen: list[str] = []
    by_hash = sorted(candidates.items(), key=lambda one: hashlib.sha256(one[0].encode()).digest())
    for group in sorted((group for _, group in by_hash), key=lambda group: max(len(group), count)):
        labels = Counter(label for specimen in group for label in specimen.points)
        fits = len(chosen) < count and (not chosen or len(group) <= count)
        if fits and all(remaining[label] > labels[label] for label in labels):
            chosen += [specimen.name for specimen in group]
            remaining.subtract(labels)
    return tuple(sorted(chosen))


def subject_of(name: str, pattern: str | None = None) -> str:
    """Return the subject that a scan shows.

    Args:
        name: Of the scan.
        pattern: Regular expression of the part of it that names the subject; None: all but a side
            or frame at its end.

    Raises:
        BadParameter: The pattern is no regular expression, or does not match the name.
    """
    if pattern is None:
        return PART.sub("", name, count=1)
    try:
        found = re.search(pattern, name)
    except re.error as error:
        raise BadParameter(
            f"--subject: expected a regular expression, got {pattern}: {error}"
        ) from None
    if found is None:
        raise BadParameter(f"--subject: expected {pattern} in the name of every scan, got {name}")
    return (found[1] if found.re.groups else None) or found[0]
