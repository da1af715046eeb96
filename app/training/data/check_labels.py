"""Facts -> findings: do all files call a landmark by one name?"""

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Final

import numpy as np

from app.training.data.issues import Finding, Severity, listed
from app.training.data.summary import Facts

RARE: Final = 0.1
"""A name in at most this share of the files, or in one of at least three, is rare."""

ALIKE: Final = 0.8
"""Share of two names' letters that agree from which they may be one, misspelt."""

SAME_PLACE_MM: Final = 1e-3


def check_labels(specimens: Sequence[Facts]) -> list[Finding]:
    """Find names that mean the same, or that hardly any file has, and points set twice.

    Args:
        specimens: All that can be read.

    Returns:
        What was found.
    """
    counts = Counter(name for facts in specimens for name in facts.points)
    findings = [finding for facts in specimens for finding in _same_place(facts)]
    explained: set[str] = set()
    for name in counts:
        usual = _other_spelling(name, counts, specimens)
        if usual is not None:
            explained.add(name)
            findings += _spelt(name, usual, specimens, "error", "is another spelling of")
    for name, files in counts.items():
        if name in explained or not _is_rare(files, len(specimens)):
            continue
        likely = _typo_of(name, counts, specimens)
        if likely is not None:
            findings += _spelt(name, likely, specimens, "warning", "may be a misspelt")
        else:
            has = listed([facts.name for facts in specimens if name in facts.points])
            findings.append(
                Finding(
                    "warning",
                    has,
                    f"landmark {name!r} is in {files} of {len(specimens)} files: "
                    "too few to learn it from; leave it out, or place it in more scans",
                )
            )
    return findings


def plain(name: str) -> str:
    """Reduce a name to its letters and digits, in lower case."""
    return re.sub(r"[\W_]+", "", name).casefold()


def _other_spelling(name: str, counts: Counter[str], specimens: Sequence[Facts]) -> str | None:
    """Find a commoner name that differs only in case, spaces and punctuation.

    No two names that one file has are the same landmark.
    """
    for other, files in counts.most_common():
        commoner = (files, other) > (counts[name], name)
        if commoner and plain(other) == plain(name) and _never_together(name, other, specimens):
            return other
    return None


def _typo_of(name: str, counts: Counter[str], specimens: Sequence[Facts]) -> str | None:
    """Find a common name that all files with this one lack, and that is nearly the same."""
    best: tuple[float, str] | None = None
    for other, files in counts.items():
        if files <= counts[name] or not _never_together(name, other, specimens):
            continue
        # Numbers tell landmarks apart: tooth_1 is no misspelt tooth_2.
        if re.findall(r"\d+", name) != re.findall(r"\d+", other):
            continue
        alike = SequenceMatcher(None, plain(name), plain(other)).ratio()
        if alike >= ALIKE and (best is None or alike > best[0]):
            best = (alike, other)
    return best and best[1]


def _never_together(name: str, other: str, specimens: Sequence[Facts]) -> bool:
    return not any(name in facts.points and other in facts.points for facts in specimens)


def _is_rare(files: int, total: int) -> bool:
    return total >= 3 and files <= max(1, RARE * total)


def _spelt(
    name: str, usual: str, specimens: Sequence[Facts], severity: Severity, verb: str
) -> list[Finding]:
    files = sum(usual in facts.points for facts in specimens)
    what = f"landmark {name!r} {verb} {usual!r}, which {files} files have"
    return [Finding(severity, facts.name, what) for facts in specimens if name in facts.points]


def _same_place(facts: Facts) -> list[Finding]:
    """Find landmarks of one scan that lie at one place, as those do that nobody has placed."""
    points = facts.placed
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)
    doubled = np.flatnonzero((apart <= SAME_PLACE_MM).sum(axis=1) > 1)
    if not doubled.size:
        return []
    names = [name for at, name in enumerate(facts.points) if at in doubled]
    x, y, z = points[doubled[0]].round(3) + 0.0  # no -0
    return [
        Finding(
            "error",
            facts.name,
            f"landmarks {listed(names)} lie at one place, ({x:.4g}, {y:.4g}, {z:.4g}) mm RAS: "
            "leave out those that are not placed",
        )
    ]
