"""Check of landmark names: spelling variants, misspellings, rare names, points placed twice."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from typing import Final

import numpy as np

from app.geometry import spacing_of
from app.model import is_label
from app.training.data.issues import Issue, Severity, shorten
from app.training.data.summary import SpecimenSummary

RARE_SHARE: Final = 0.1
"""A name in at most this share of the files, or in one of at least three, is rare."""

MIN_SIMILARITY: Final = 0.8
"""Share of matching letters from which one of two names may be a misspelling of the other."""

SAME_POSITION_MM: Final = 1e-3
SAME_POSITION_VOXELS: Final = 0.1
"""Points as near as both are at one position; voxels may be smaller than a micrometre."""


def check_labels(specimens: Sequence[SpecimenSummary]) -> list[Issue]:
    """Find names that mean the same landmark, rare names, and points placed twice."""
    counts = Counter(name for specimen in specimens for name in specimen.points)
    issues = [issue for specimen in specimens for issue in _check_same_position(specimen)]
    issues += [_bad_name(name, specimens) for name in counts if not is_label(name)]
    prefixed = _check_prefixes(specimens, counts)
    where = {issue.where for issue in prefixed}
    others = [specimen for specimen in specimens if specimen.name not in where]
    return [*issues, *prefixed, *_check_spellings(others)]


def _check_spellings(specimens: Sequence[SpecimenSummary]) -> list[Issue]:
    """Find names that differ in their spelling, or are in few files."""
    counts = Counter(name for specimen in specimens for name in specimen.points)
    settled: set[str] = set()
    issues = []
    for name in counts:
        usual = _common_spelling(name, counts, specimens)
        if usual is not None:
            settled.add(name)
            issues += _spelling_issues(name, usual, specimens, "error", "is another spelling of")
    for specimen in specimens:
        names = specimen.points.keys()
        alone = len(specimens) > 1 and all(counts[name] == 1 for name in names)
        if alone and settled.isdisjoint(names):
            settled.update(names)
            message = f"none of its {len(names)} landmark names is in another file: name them alike"
            issues.append(Issue("warning", specimen.name, message))
    for name, files in counts.items():
        if name not in settled and _is_rare(files, len(specimens)):
            issues += _check_rare(name, counts, specimens)
    return issues


def _check_prefixes(specimens: Sequence[SpecimenSummary], counts: Counter[str]) -> list[Issue]:
    """Find files all of whose names have a prefix that those of the others lack, or the reverse."""
    if not specimens:
        return []

    def usualness(specimen: SpecimenSummary) -> tuple[int, int]:
        return max(counts[name] for name in specimen.points), -len("".join(specimen.points))

    usual = max(specimens, key=usualness).points
    issues = []
    for specimen in specimens:
        if prefix := _find_prefix(specimen.points, usual):
            message = f"names differ from those of the others by the prefix {prefix!r}"
        elif prefix := _find_prefix(usual, specimen.points):
            message = f"names lack the prefix {prefix!r} that those of the others have"
        else:
            continue
        issues.append(Issue("error", specimen.name, message))
    return issues


def _find_prefix(names: Collection[str], others: Collection[str]) -> str:
    """Find what most names of a file have in front of those of another, with none in common."""
    if not names or set(names) & set(others):
        return ""
    ends = Counter(
        name[: -len(other)] for name in names for other in others if name.endswith(other)
    )
    prefix, found = max(ends.items(), key=lambda item: item[1], default=("", 0))
    constant = all(name.startswith(prefix) for name in names)
    # Teeth 11 and 12 are not the teeth 1 and 2.
    if not constant or prefix[-1:].isdigit() or found < max(2, min(len(names), len(others)) / 2):
        return ""
    return prefix


def _check_rare(
    name: str, counts: Counter[str], specimens: Sequence[SpecimenSummary]
) -> list[Issue]:
    """Warn of a name that few files have: as of a misspelling, if it may be one."""
    likely = _probable_spelling(name, counts, specimens)
    if likely is not None:
        return _spelling_issues(name, likely, specimens, "warning", "may be a misspelt")
    where = shorten([specimen.name for specimen in specimens if name in specimen.points])
    message = (
        f"landmark {name!r} is in {counts[name]} of {len(specimens)} files: too few to learn it "
        "from; leave it out, or place it in more scans"
    )
    return [Issue("warning", where, message)]


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
    near = min(SAME_POSITION_MM, SAME_POSITION_VOXELS * spacing_of(specimen.affine).min())
    duplicates = np.flatnonzero((distance <= near).sum(axis=1) > 1)
    if not duplicates.size:
        return []
    names = [name for index, name in enumerate(specimen.points) if index in duplicates]
    x, y, z = points[duplicates[0]].round(6) + 0.0  # no -0
    return [
        Issue(
            "error",
            specimen.name,
            f"landmarks {shorten(names)} share one position, ({x:.4g}, {y:.4g}, {z:.4g}) mm RAS: "
            "leave out those that are not placed",
        )
    ]
