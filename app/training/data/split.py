"""specimens -> those to learn from and those to judge by."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.errors import BadParameter
from app.training.data.issues import listed
from app.training.data.summary import Facts

SHARE: Final = 5
"""One in so many scans is held out."""

MOST: Final = 5
"""More tell hardly more, and every validation waits for them."""


@dataclass(frozen=True, slots=True)
class Split:
    """Who is learned from.

    Attributes:
        train: Specimens to learn from.
        held_out: Specimens to judge by; no weight ever sees them.
        reason: Why these, in words.
    """

    train: tuple[Facts, ...]
    held_out: tuple[Facts, ...]
    reason: str


def split(
    specimens: Sequence[Facts],
    wanted: Sequence[str] | None,
    reason: str = "",
    train_only: Sequence[str] = (),
) -> Split:
    """Decide who is learned from.

    Args:
        specimens: All there are.
        wanted: Names of those to hold out; None: choose a fifth of them, at least one and at most
            five, always the same ones of the same scans.
        reason: Why those that are wanted are.
        train_only: Names of those to learn from in any case.

    Returns:
        The split.

    Raises:
        BadParameter: A name is none of theirs or in both lists, or nobody is left to learn from.
    """
    names = {facts.name for facts in specimens}
    unknown = set(wanted or ()) - names
    if unknown:
        raise BadParameter(
            f"--validate: expected names of scans, found none named {listed(sorted(unknown))}; "
            f"there are {listed(sorted(names))}"
        )
    check_train_only(specimens, train_only)
    both = set(wanted or ()) & set(train_only)
    if both:
        raise BadParameter(
            f"--validate: expected none that are in --train-only, got {listed(sorted(both))}"
        )
    if wanted is None:
        wanted = choose(specimens, train_only)
        reason = f"about one in {SHARE}, always the same ones; --validate NAME,NAME or none"
    train = tuple(facts for facts in specimens if facts.name not in wanted)
    held_out = tuple(facts for facts in specimens if facts.name in wanted)
    if not train:
        raise BadParameter("--validate: expected scans to be left to learn from, got none")
    return Split(train, held_out, reason)


def check_train_only(specimens: Sequence[Facts], train_only: Sequence[str]) -> None:
    """Check that scans which shall only be learned from are there.

    Raises:
        BadParameter: Some are not.
    """
    unknown = set(train_only) - {facts.name for facts in specimens}
    if unknown:
        raise BadParameter(
            f"--train-only: expected names of scans, found none named {listed(sorted(unknown))}"
        )


def choose(specimens: Sequence[Facts], train_only: Sequence[str] = ()) -> tuple[str, ...]:
    """Choose whom to hold out, by a hash of the name: new scans change little about who that is.

    Whoever alone has some landmark is learned from.
    """
    if len(specimens) < 2:
        return ()
    open_to = [facts for facts in specimens if facts.name not in train_only]
    count = min(max(round(len(open_to) / SHARE), 1), MOST)
    left = Counter(label for facts in specimens for label in facts.points)
    chosen: list[str] = []
    for facts in sorted(open_to, key=lambda facts: hashlib.sha256(facts.name.encode()).digest()):
        if len(chosen) < count and all(left[label] > 1 for label in facts.points):
            chosen.append(facts.name)
            left.subtract(facts.points.keys())
    return tuple(sorted(chosen))
