"""Check of landmark names: spelling variants, misspellings, rare names, points placed twice."""

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Final

import numpy as np

from app.model import is_label
from app.training.data.issues import Issue, Severity, shorten
from app.training.data.summary import SpecimenSummary

RARE_SHARE: Final = 0.1
"""A name in at most this share of the files, or in one of at least three, is rare."""

MIN_SIMILARITY: Final = 0.8
"""Share of matching letters from which one of two names may be a misspelling of the other."""

SAME_POSITION_MM: Final = 1e-3


def check_labels(specimens: Sequence[SpecimenSummary]) -> list[Issue]:
    """Find names that mean the same landmark, rare names, and points placed twice."""
    counts = Counter(name for specimen in specimens for name in specimen.points)
    issues = [issue for specimen in specimens for issue in _check_same_position(specimen)]
    issues += [_bad_name(name, specimens) for name in counts if not is_label(name)]
    variants: set[str] = set()
    for name in counts:
        usual = _common_spelling(name, counts, specimens)
        if usual is not None:
            variants.add(name)
            issues += _spelling_issues(name, usual, specimens, "error", "is another spelling of")
    for name, files in counts.items():
        if name in variants or not _is_rare(files, len(specimens)):
            continue
        likely = _probable_spelling(name, counts, specimens)
        if likely is not None:
            issues += _spelling_issues(name, likely, specimens, "warning", "may be a misspelt")
        else:
            where = shorten([specimen.name for specimen in specimens if name in specimen.points])
            issues.append(
                Issue(
                    "warning",
                    where,
                    f"landmark {name!r} is in {files} of {len(specimens)} files: "
                    "too few to learn it from; leave it out, or place it in more scans",
                )
            )
    return issues


def _bad_name(name: str, specimens: Sequence[SpecimenSummary]) -> Issue:
    where = shorten([specimen.name for specimen in specimens if name in specimen.points])
    expected = "1 to 128 letters, none of them a control character"
    return Issue("error", where, f"landmark {name[:40]!r}: expected a name of {expected}")


def normalise_label(name: str) -> str:
    """Reduce a name to its letters and digits, in lower case."""
    return re.sub(r"[\W_]+", "", name).casefold()


def _common_spelling(
    name: str, counts: Counter[str], specimens: Sequence[SpecimenSummary]
) -> str | None:
    """Find a commoner name that differs only in case, spaces and punctuation.

    Two names in one file are always two landmarks.
    """
    for other, files in counts.most_common():
        commoner = (files, other) > (counts[name], name)
        same = normalise_label(other) == normalise_label(name)
        if commoner and same and _never_together(name, other, specimens):
            return other
    return None


def _probable_spelling(
    name: str, counts: Counter[str], specimens: Sequence[SpecimenSummary]
) -> str | None:
    """Find the most similar commoner name that no file has together with this one."""
    best: tuple[float, str] | None = None
    for other, files in counts.items():
        if files <= counts[name] or not _never_together(name, other, specimens):
            continue
        # Numbers distinguish landmarks: tooth_1 is no misspelling of tooth_2.
        if re.findall(r"\d+", name) != re.findall(r"\d+", other):
            continue
        matcher = SequenceMatcher(None, normalise_label(name), normalise_label(other))
        similarity = matcher.ratio()
        if similarity >= MIN_SIMILARITY and (best is None or similarity > best[0]):
            best = (similarity, other)
    return best and best[1]


def _never_together(name: str, other: str, specimens: Sequence[SpecimenSummary]) -> bool:
    return not any(name in specimen.points and other in specimen.points for specimen in specimens)


def _is_rare(files: int, total: int) -> bool:
    return total >= 3 and files <= max(1, RARE_SHARE * total)


def _spelling_issues(
    name: str,
    usual: str,
    specimens: Sequence[SpecimenSummary],
    severity: Severity,
    relation: str,
) -> list[Issue]:
    files = sum(usual in specimen.points for specimen in specimens)
    message = f"landmark {name!r} {relation} {usual!r}, which {files} files have"
    return [
        Issue(severity, specimen.name, message) for specimen in specimens if name in specimen.points
    ]


def _check_same_position(specimen: SpecimenSummary) -> list[Issue]:
    """Find landmarks of one scan at one position, as unplaced ones often are."""
    points = specimen.positions
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    duplicates = np.flatnonzero((distance <= SAME_POSITION_MM).sum(axis=1) > 1)
    if not duplicates.size:
        return []
    names = [name for index, name in enumerate(specimen.points) if index in duplicates]
    x, y, z = points[duplicates[0]].round(3) + 0.0  # no -0
    return [
        Issue(
            "error",
            specimen.name,
            f"landmarks {shorten(names)} share one position, ({x:.4g}, {y:.4g}, {z:.4g}) mm RAS: "
            "leave out those that are not placed",
        )
    ]
