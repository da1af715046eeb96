"""Folders of scans and landmark files -> Checked: all that is wrong with them, before training.

Every file is read and every fault told at once, as nobody wants to learn of the second one only
after mending the first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from app.training.data.check_frames import check_frames
from app.training.data.check_labels import check_labels, plain
from app.training.data.check_shapes import check_shapes
from app.training.data.issues import Finding, count, listed
from app.training.data.robust_shape import Typical, find_typical
from app.training.data.specimens import Files, list_files
from app.training.data.summary import Facts, gather

Pair = tuple[str, Path, Path]
Watch = Callable[[Sequence[Pair]], Iterable[Pair]]


@dataclass(frozen=True, slots=True)
class Checked:
    """Data that were looked through.

    Attributes:
        specimens: Those that can be read.
        names: Of the landmarks, in order of first appearance.
        typical: Their typical constellation; None if too few specimens tell.
        findings: What is wrong or worth knowing.
    """

    specimens: tuple[Facts, ...]
    names: tuple[str, ...]
    typical: Typical | None
    findings: tuple[Finding, ...]

    def may_train(self, strict: bool) -> bool:
        """Say whether nothing forbids to train on the data; strictly, no warning either."""
        errors = count(self.findings, "error")
        return not errors and not (strict and count(self.findings, "warning"))

    def summary(self) -> str:
        """Say how much there is, and how much of it is wrong."""
        numbers = {
            "scan": len(self.specimens),
            "landmark": len(self.names),
            "error": count(self.findings, "error"),
            "warning": count(self.findings, "warning"),
        }
        words = [f"{number} {word}{'' if number == 1 else 's'}" for word, number in numbers.items()]
        return f"{words[0]} with {words[1]}: {words[2]}, {words[3]}"


def check_data(scans: Path, landmarks: Path, watch: Watch = iter) -> Checked:
    """Look through training data.

    Args:
        scans: Folder of scans.
        landmarks: Folder of landmark files; may be the same.
        watch: Passes the pairs on one by one, to show how far it is.

    Returns:
        The specimens, and what was found.
    """
    files = list_files(scans, landmarks)
    findings = _check_files(files)
    specimens: list[Facts] = []
    for pair in watch(files.pairs()):
        facts, found = gather(pair)
        findings += found
        if facts is not None:
            specimens.append(facts)
    names = tuple(dict.fromkeys(name for facts in specimens for name in facts.points))
    findings += [*_check_doubles(specimens), *check_frames(specimens), *check_labels(specimens)]
    sound = [facts for facts in specimens if not facts.outside]
    typical = find_typical([facts.rows(names) for facts in sound])
    findings += check_shapes(sound, names, typical)
    findings += _check_missing(specimens, names)
    return Checked(tuple(specimens), names, typical, tuple(findings))


def _check_files(files: Files) -> list[Finding]:
    """Find files without a counterpart, and others that are not read."""
    findings = [
        Finding("error", name, "several files have this name: keep one") for name in files.doubled
    ]
    lone = [name for name in files.landmarks if name not in files.scans]
    for name, scan in files.scans.items():
        if name not in files.landmarks:
            near = _nearest(name, lone)
            hint = f"; is it {files.landmarks[near].name}?" if near else ""
            what = f"expected a landmark file {name}.mrk.json, .fcsv or .csv, found none{hint}"
            findings.append(Finding("error", scan.name, what))
    findings += [
        Finding("warning", files.landmarks[name].name, "no scan has this name: it is not used")
        for name in lone
    ]
    findings += [
        Finding(
            "warning", path.name, "neither a .nii or .nii.gz scan nor a landmark file: not used"
        )
        for path in files.others
    ]
    if not files.scans:
        findings.append(Finding("error", "", "expected .nii or .nii.gz scans, found none"))
    return findings


def _nearest(name: str, others: Sequence[str]) -> str | None:
    """Find the name that was probably meant."""
    for other in others:
        if plain(other) == plain(name):
            return other
    return next(iter(get_close_matches(name, others, n=1, cutoff=0.85)), None)


def _check_doubles(specimens: Sequence[Facts]) -> list[Finding]:
    """Find scans that are there twice, and landmark files copied from one scan to another."""
    by_voxels: dict[str, list[Facts]] = defaultdict(list)
    by_points: dict[bytes, list[Facts]] = defaultdict(list)
    for facts in specimens:
        by_voxels[facts.digest].append(facts)
        by_points[np.round(facts.placed, 4).tobytes()].append(facts)
    findings = []
    for group in by_voxels.values():
        if len(group) > 1:
            what = "one scan under several names: it would be learned from and judged by; keep one"
            findings.append(Finding("error", listed([facts.name for facts in group]), what))
    for group in by_points.values():
        if len({facts.digest for facts in group}) > 1:
            what = "the landmark files of different scans hold the same coordinates"
            findings.append(Finding("error", listed([facts.name for facts in group]), what))
    return findings


def _check_missing(specimens: Sequence[Facts], names: Sequence[str]) -> list[Finding]:
    """Note that some landmarks have no place in some scans, and what that will mean."""
    lacking = [facts.name for facts in specimens if len(facts.points) < len(names)]
    if not lacking:
        return []
    total = len(specimens) * len(names)
    there = sum(len(facts.points) for facts in specimens)
    return [
        Finding(
            "note",
            listed(lacking),
            f"{total - there} of {total} places are not given; they count as unknown, "
            "or with --missing absent as not in the scan",
        )
    ]
