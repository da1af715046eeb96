"""model folder + scans -> which of them it has learned from, so that they cannot judge it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from app.errors import BadParameter
from app.model import read_manifest
from app.training.data.folds import digests_of, read_folds
from app.training.data.issues import listed
from app.training.data.summary import gather
from app.training.evaluate.outcomes import Pair
from app.training.fit.checkpoint import read_record

NAMED: Final = 8
"""Scans that a message names; of the others it gives the number."""


def learned_from(folder: Path, pairs: Sequence[Pair]) -> list[str]:
    """List the scans that a model has learned from, with either network, as far as it tells.

    They are known by name, and by their content, too, if the model was trained with folds, which
    keep that of each scan.

    Args:
        folder: The model folder.
        pairs: Name, scan and landmark file of each specimen.

    Returns:
        Their names; none if nothing says what the model has learned from.

    Raises:
        ModelRefused: The folder is no model.
    """
    refine = read_manifest(folder).refine
    folders = [folder] if refine is None else [folder, folder / refine.folder]
    records = [read_record(inner) or {} for inner in folders]
    names = {name for record in records for name in record.get("train", ())}
    folds = read_folds(folder)
    contents = {} if folds is None else folds.digests
    digests = {contents[name] for name in names if name in contents}
    return [
        pair[0] for pair in pairs if pair[0] in names or (digests and _digest_of(pair) in digests)
    ]


def refuse_learned(folder: Path, pairs: Sequence[Pair]) -> None:
    """Refuse scans that a model has learned from.

    Raises:
        BadParameter: There are such scans; they are named.
        ModelRefused: The folder is no model.
    """
    seen = learned_from(folder, pairs)
    if seen:
        raise BadParameter(
            f"--only: expected scans that no weight was trained on, {folder} has learned from "
            f"{listed(seen, NAMED)}: leave them out, as errors of such scans promise nothing of "
            "others; or use --folds, if the model has folds"
        )


def warning_of(seen: Sequence[str]) -> str:
    """Say that a model has learned from scans that it is measured on; nothing if there are none."""
    if not seen:
        return ""
    return (
        f"the model has learned from {listed(seen, NAMED)}: the error of such scans is not that "
        "of unseen ones"
    )


def _digest_of(pair: Pair) -> str | None:
    """Hash a scan with its landmarks as folds do; None if it cannot be read."""
    facts, _ = gather(pair)
    return None if facts is None else digests_of([facts])[pair[0]]
