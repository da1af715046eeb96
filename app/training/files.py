"""What a training keeps in its model folder beside the model, and how far it is by these files."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from app.errors import StartupError

RECORD: Final = "recipe.json"
CHECKPOINT: Final = "checkpoint.pt"
HISTORY: Final = "history.csv"
CURVES: Final = "curves.png"
OUTCOMES: Final = "outcomes.json"

REFINE: Final = "refine"
"""Folder of the second network, within that of the first."""

FOLDS: Final = "folds"
"""Folder of the model folders of a cross-validation, within that of the model."""

TABLES: Final = "crossvalidation"
"""Folder of the tables of such a cross-validation in models that are shipped without the folds."""

EXPORT_EVERY: Final = 500
"""Steps after which a training saves a checkpoint, writes the model and validates it."""


@contextmanager
def refuse_damaged(path: Path) -> Iterator[None]:
    """Refuse a file of which a block of code cannot make what a training has written.

    Raises:
        StartupError: The block raises what a file raises that is cut off, or something else.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise StartupError(
            f"expected {path} as a training has written it, got {reason:.300}: restore it, or "
            "train into another folder"
        ) from error


def describe_unfinished(folder: Path) -> str | None:
    """Describe a training that has not written its model yet.

    Returns:
        The step that the training has reached and the one at which it writes the model; None if
        the folder holds a model, or no training.

    Raises:
        StartupError: Its files are damaged.
    """
    if (folder / "model.toml").exists() or not (folder / RECORD).exists():
        return None
    step = 0
    with refuse_damaged(folder / RECORD):
        steps = int(json.loads((folder / RECORD).read_text(encoding="utf-8"))["recipe"]["steps"])
    if (folder / HISTORY).exists():
        with (
            refuse_damaged(folder / HISTORY),
            (folder / HISTORY).open(encoding="utf-8", newline="") as lines,
        ):
            step = max((int(row["step"]) for row in csv.DictReader(lines)), default=0)
    export = min((step // EXPORT_EVERY + 1) * EXPORT_EVERY, steps)
    return (
        f"{folder.name} is no model yet: its training stands at step {step} of {steps} and writes "
        f"the model at step {export}; if it was interrupted, the same command resumes it"
    )
