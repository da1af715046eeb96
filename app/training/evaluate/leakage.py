"""Data leakage: which scans a model was trained on, so that they cannot measure it."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from app.errors import BadParameter
from app.model import read_manifest
from app.training.data.folds import content_digests, read_folds
from app.training.data.issues import LINE_NAMES, shorten
from app.training.data.specimens import SpecimenFiles
from app.training.data.summary import summarise
from app.training.files import RECORD
from app.training.record import read_record, seen_by


def find_leaked(folder: Path, specimens: Sequence[SpecimenFiles]) -> list[str]:
    """List the scans that either network of a model was trained on, as far as its records say.

    Scans are matched by name, and also by content, of which records and folds keep hashes; of
    records from before these had hashes of scans alone, only with the same landmarks.

    Returns:
        Their names; empty if nothing says what the model was trained on.

    Raises:
        ModelRefused: The folder is no model.
    """
    records = _records(folder)
    names = {name for record in records for name in seen_by(record)}
    folds = read_folds(folder)
    known = {} if folds is None else folds.digests
    digests = {known[name] for name in names if name in known}
    digests.update(*(record.get("digests", {}).values() for record in records))
    voxels = {digest for record in records for digest in record.get("voxels", ())}
    return [
        files.name
        for files in specimens
        if files.name in names or ((digests or voxels) and _is_among(files, digests, voxels))
    ]


def describe_unrecorded(folder: Path) -> str:
    """Warn that nothing says which scans a model was trained on; empty if its records do.

    Raises:
        ModelRefused: The folder is no model.
    """
    if all(_records(folder)):
        return ""
    return (
        f"{folder} has no {RECORD}, so it cannot be told which scans the model was trained on: its "
        "error on such scans is not that on unseen ones"
    )


def refuse_leaked(folder: Path, specimens: Sequence[SpecimenFiles]) -> None:
    """Refuse scans that a model was trained on.

    Raises:
        BadParameter: There are such scans; they are named.
        ModelRefused: The folder is no model.
    """
    leaked = find_leaked(folder, specimens)
    if leaked:
        raise BadParameter(
            f"--only: expected scans that the model was not trained on, {folder} was trained on "
            f"{shorten(leaked, LINE_NAMES)}: leave them out, as their errors say nothing about "
            "other scans; or use --folds, if the model has folds"
        )


def describe_leaked(leaked: Sequence[str]) -> str:
    """Warn that a model is measured on scans that it was trained on; empty if there are none."""
    if not leaked:
        return ""
    return (
        f"the model was trained on {shorten(leaked, LINE_NAMES)}: its error on such scans is not "
        "that on unseen ones"
    )


def _records(folder: Path) -> list[dict[str, Any]]:
    """Read the record of each network of a model; empty of one that has none."""
    return [read_record(folder / name) for name in read_manifest(folder).folders]


def _is_among(files: SpecimenFiles, digests: Set[str], voxels: Set[str]) -> bool:
    """Return whether a scan, or it with its landmarks, has one of these hashes; False if unread."""
    specimen, _ = summarise(files)
    if specimen is None:
        return False
    return specimen.digest in voxels or content_digests([specimen])[files.name] in digests
