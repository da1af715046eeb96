"""model with folds -> for each scan, the model that never saw it, to calibrate by."""

from pathlib import Path

import torch

from app.errors import BadParameter
from app.inference import load_checked
from app.model import LoadedModel
from app.training.data.check_data import check_data
from app.training.data.folds import FOLDS, Folds, check_same_data, digests_of, read_folds
from app.training.evaluate.model_card import write_section
from app.training.evaluate.outcome_files import OUTCOMES


def folds_of(folder: Path, model: LoadedModel, scans: Path, landmarks: Path) -> Folds:
    """Read the folds of a model, and check that they are done and of these data.

    Args:
        folder: The model folder.
        model: The model.
        scans: Folder of scans.
        landmarks: Folder of landmark files.

    Returns:
        The folds.

    Raises:
        BadParameter: The model has no folds, or they lack a network.
        StartupError: The data are others than those of the folds.
    """
    folds = read_folds(folder)
    if folds is None:
        raise BadParameter(
            f"--folds: expected a model that was trained with --folds, found none in "
            f"{folder / FOLDS}"
        )
    check_same_data(folder, folds, digests_of(check_data(scans, landmarks).specimens))
    refine = model.manifest.refine
    inner = "" if refine is None else refine.folder
    for number in range(1, len(folds.members) + 1):
        path = folds.folder(folder, number) / inner
        if not (path / OUTCOMES).exists():
            command = "train" if refine is None else "refine"
            raise BadParameter(
                f"--folds: expected {path} to be done; landmarkd {command} --folds does it"
            )
    return folds


def models_of(folder: Path, folds: Folds, device: torch.device) -> dict[str, LoadedModel]:
    """Load the models of all folds.

    Args:
        folder: The model folder.
        folds: Its folds.
        device: Where the networks shall run.

    Returns:
        For each scan the model that never saw it.

    Raises:
        ModelRefused: The folder of a fold breaks the contract.
    """
    found: dict[str, LoadedModel] = {}
    for number, names in enumerate(folds.members, start=1):
        model = load_checked(folds.folder(folder, number), device)
        found |= dict.fromkeys(names, model)
    return found


def describe(folder: Path, told: str) -> None:
    """Write a section of the model's card: what its regions rest on, and what they promise."""
    text = f"## 95 % regions\n\nBy `landmarkd calibrate --folds`: {told}."
    write_section(folder, "calibration", text)
