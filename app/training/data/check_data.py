"""Checks of a whole data set: every file is read, and all issues are reported at once."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from app.io import SCAN_SUFFIXES
from app.shapes import RobustShape, estimate_robust_shape
from app.training.data.check_frames import check_frames
from app.training.data.check_labels import check_labels, normalise_label
from app.training.data.check_shapes import check_shapes
from app.training.data.issues import Issue, count_issues, shorten
from app.training.data.specimens import DataFiles, SpecimenFiles, list_files
from app.training.data.summary import SpecimenSummary, summarise

ProgressBar = Callable[[Sequence[SpecimenFiles]], Iterable[SpecimenFiles]]


@dataclass(frozen=True, slots=True)
class CheckedData:
    """Data that were checked.

    Attributes:
        specimens: Those that can be read.
        names: Landmark names, in order of first appearance.
        robust_shape: Their median constellation; None if there are too few specimens.
    """

    specimens: tuple[SpecimenSummary, ...]
    names: tuple[str, ...]
    robust_shape: RobustShape | None
    issues: tuple[Issue, ...]

    def may_train(self, strict: bool) -> bool:
        """Return whether there are no errors and, if strict, no warnings either."""
        errors = count_issues(self.issues, "error")
        return not errors and not (strict and count_issues(self.issues, "warning"))

    def summary(self) -> str:
        """Count scans, landmarks, errors and warnings, in words."""
        numbers = {
            "scan": len(self.specimens),
            "landmark": len(self.names),
            "error": count_issues(self.issues, "error"),
            "warning": count_issues(self.issues, "warning"),
        }
        words = [f"{number} {word}{'' if number == 1 else 's'}" for word, number in numbers.items()]
        return f"{words[0]} with {words[1]}: {words[2]}, {words[3]}"


def check_data(scans: Path, landmarks: Path, progress: ProgressBar = iter) -> CheckedData:
    """Check a folder of scans and one of landmark files, which may be the same."""
    files = list_files(scans, landmarks)
    issues = _check_files(files)
    specimens: list[SpecimenSummary] = []
    for pair in progress(files.pairs()):
        specimen, found = summarise(pair)
        issues += found
        if specimen is not None:
            specimens.append(specimen)
    names = tuple(dict.fromkeys(name for specimen in specimens for name in specimen.points))
    issues += [*_check_duplicates(specimens), *check_frames(specimens), *check_labels(specimens)]
    inside = [specimen for specimen in specimens if not specimen.outside]
    robust_shape = estimate_robust_shape([specimen.rows(names) for specimen in inside])
    issues += check_shapes(inside, names, robust_shape)
    issues += _check_missing(specimens, names)
    return CheckedData(tuple(specimens), names, robust_shape, tuple(issues))


def _check_files(files: DataFiles) -> list[Issue]:
    """Find files without a counterpart, and files that are not read."""
    issues = [
        Issue("error", name, "several files have this name: keep one") for name in files.duplicates
    ]
    unpaired = [name for name in files.landmarks if name not in files.scans]
    for name, scan in files.scans.items():
        if name not in files.landmarks:
            similar = _most_similar(name, unpaired)
            hint = f"; is it {files.landmarks[similar].name}?" if similar else ""
            message = f"expected a landmark file {name}.mrk.json, .fcsv or .csv, found none{hint}"
            issues.append(Issue("error", scan.name, message))
    issues += [
        Issue("warning", files.landmarks[name].name, "no scan has this name: it is not used")
        for name in unpaired
    ]
    issues += [
        Issue("warning", path.name, "neither a scan nor a landmark file: not used")
        for path in files.others
    ]
    if not files.scans:
        issues.append(
            Issue("error", "", f"expected scans ({', '.join(SCAN_SUFFIXES)}), found none")
        )
    return issues


def _most_similar(name: str, others: Sequence[str]) -> str | None:
    """Find the name that was probably meant."""
    for other in others:
        if normalise_label(other) == normalise_label(name):
            return other
    return next(iter(get_close_matches(name, others, n=1, cutoff=0.85)), None)


def _check_duplicates(specimens: Sequence[SpecimenSummary]) -> list[Issue]:
    """Find scans with the same voxels, and different scans with the same landmarks."""
    by_voxels: dict[str, list[SpecimenSummary]] = defaultdict(list)
    by_points: dict[bytes, list[SpecimenSummary]] = defaultdict(list)
    for specimen in specimens:
        by_voxels[specimen.digest].append(specimen)
        positions = np.round(specimen.positions, specimen.decimals + 1)
        by_points[positions.tobytes()].append(specimen)
    issues = []
    for group in by_voxels.values():
        if len(group) > 1:
            message = (
                "one scan under several names, which could be in training and validation at once: "
                "keep one"
            )
            issues.append(Issue("error", shorten([one.name for one in group]), message))
    for group in by_points.values():
        if len({specimen.digest for specimen in group}) > 1:
            message = "the landmark files of different scans hold the same coordinates"
            issues.append(Issue("error", shorten([one.name for one in group]), message))
    return issues


def _check_missing(specimens: Sequence[SpecimenSummary], names: Sequence[str]) -> list[Issue]:
    """Note that some scans lack some landmarks, and how those are treated."""
    incomplete = [specimen.name for specimen in specimens if len(specimen.points) < len(names)]
    if not incomplete:
        return []
    total = len(specimens) * len(names)
    given = sum(len(specimen.points) for specimen in specimens)
    return [
        Issue(
            "note",
            shorten(incomplete),
            f"{total - given} of {total} positions are not given; they count as unknown, or with "
            "--missing absent as not in the scan, as those do that a person has marked so",
        )
    ]
