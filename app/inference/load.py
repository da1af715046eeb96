"""Model folder -> LoadedModel that has passed its self-check, by noise or by a whole phantom."""

from pathlib import Path

import numpy as np
import torch

from app.geometry import Points
from app.inference.detector import Detector
from app.model import LoadedModel, PrecisionSetting, check, load_model
from app.phantom import make_phantom


def load_checked(
    folder: Path, device: torch.device, precision: PrecisionSetting = "float32"
) -> LoadedModel:
    """Load a model folder; it must pass its self-check, by noise or by a whole phantom.

    Args:
        folder: The model folder.
        device: Where the network shall run.
        precision: What it shall compute in; ``auto``: see ``app.model.precision``.

    Returns:
        The model.

    Raises:
        ModelRefused: The folder breaks the contract; the key and the reason are named.
    """
    return load_model(folder, device, _detect_phantom, precision)


def check_again(folder: Path, model: LoadedModel) -> None:
    """Run a loaded model's self-check again, after its device was in trouble.

    Args:
        folder: The model's folder.
        model: The model as it serves.

    Raises:
        ModelRefused: It does not answer what it answered when its folder was made.
    """
    check(folder, model.manifest, model.network, lambda seed: _detect_phantom(model, seed))


def _detect_phantom(model: LoadedModel, seed: int) -> tuple[Points, Points]:
    """Find a phantom's landmarks; gives the points found and the true ones in mm, RAS."""
    phantom = make_phantom(seed)
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    missing = np.full(3, np.nan)
    landmarks = Detector(model).detect(phantom.volume).landmarks
    found = [missing if mark.ras_mm is None else mark.ras_mm for mark in landmarks]
    return np.stack(found), np.stack([truth.get(mark.name, missing) for mark in landmarks])
