"""Model folder -> LoadedModel that has passed its self-check.

The check compares the network's output for noise, or the landmarks of a phantom, with what the
folder promises; only this layer can find landmarks.
"""

from pathlib import Path

import numpy as np
import torch

from app.geometry import Points
from app.inference.detector import Detector
from app.model import LoadedModel, PrecisionSetting, check, load_model
from app.phantom import make_phantom


def load_checked(
    folder: Path,
    device: torch.device,
    precision: PrecisionSetting = "float32",
    *,
    allow_torchscript: bool = False,
) -> LoadedModel:
    """Load a model folder, which must pass its self-check.

    Args:
        folder: The model folder.
        device: Device to run the network on.
        precision: To compute in; ``auto``: see ``app.model.precision``.
        allow_torchscript: Whether programs may be TorchScript; see ``LANDMARKD_ALLOW_TORCHSCRIPT``.

    Returns:
        The model.

    Raises:
        ModelRefused: The folder breaks the contract; the key and the reason are named.
    """
    return load_model(
        folder, device, _detect_phantom, precision, allow_torchscript=allow_torchscript
    )


def check_again(folder: Path, model: LoadedModel) -> None:
    """Run the self-check of a loaded model again, after a fault of its device.

    Args:
        folder: The model's folder.
        model: The model as it serves.

    Raises:
        ModelRefused: Its output is not what its folder promises.
    """
    check(folder, model.manifest, model.network, lambda seed: _detect_phantom(model, seed))


def _detect_phantom(model: LoadedModel, seed: int) -> tuple[Points, Points]:
    """Find the landmarks of a phantom; gives the points found and the true ones in mm, RAS."""
    phantom = make_phantom(seed)
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    missing = np.full(3, np.nan)
    landmarks = Detector(model).detect(phantom.volume).landmarks
    found = [missing if landmark.ras_mm is None else landmark.ras_mm for landmark in landmarks]
    return np.stack(found), np.stack([truth.get(landmark.name, missing) for landmark in landmarks])
