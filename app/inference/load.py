"""Model folder -> LoadedModel that has passed its self-check.

The check compares the network's output for noise, or the landmarks of a phantom, with what the
folder promises; only this layer can find landmarks.
"""

import logging
from pathlib import Path

import numpy as np
import torch

from app.compute import OnDevice, call_here, has_compiled_loops, is_out_of_memory
from app.errors import InsufficientMemory, ModelRefused, NotReady
from app.inference.detector import Detector
from app.inference.precompile import compile_loops
from app.model import LoadedModel, PrecisionSetting, check_noise, check_points, load_model
from app.phantom import make_phantom
from app.voting import filter_votes, positions_of

logger = logging.getLogger("landmarkd.model")


def load_checked(
    folder: Path,
    device: torch.device,
    precision: PrecisionSetting = "float32",
    *,
    allow_torchscript: bool = False,
    on_device: OnDevice = call_here,
) -> LoadedModel:
    """Load a model folder, which must pass its self-check.

    Args:
        folder: The model folder.
        device: Device to run the network on.
        precision: To compute in; ``auto``: see ``app.model.registry.choose_precision``.
        allow_torchscript: Whether programs may be TorchScript; see ``LANDMARKD_ALLOW_TORCHSCRIPT``.
        on_device: Calls what touches the device on the thread that owns it, piece by piece, so that
            other work goes on in between; all else is done in the calling thread.

    Raises:
        ModelRefused: The folder cannot be used; the key and the reason are named.
        NotReady: The device's thread has ended.
    """
    if not has_compiled_loops():
        logger.info("compiling loops, once on this machine")
    try:
        model = load_model(
            folder, device, precision, allow_torchscript=allow_torchscript, on_device=on_device
        )
        # Else the first scan of a kind would wait for the compiler, and its time count as a tile's.
        # Before the check: what that compiled, on threads that a stop waits for, would delay it.
        compile_loops()
        self_check(model, on_device)
    except (ModelRefused, NotReady):
        raise
    except Exception as error:
        # Whatever it is, it must not keep the other folders from being loaded.
        raise ModelRefused(f"{folder.name}: {_reason(error, device)}") from error
    network = model.network
    context = {"model": folder.name, "device": str(device), "precision": network.precision}
    logger.info("model loaded", extra=context)
    return model


def self_check(model: LoadedModel, on_device: OnDevice = call_here) -> None:
    """Run the self-check of a loaded model, for which nothing is read from its folder.

    Raises:
        ModelRefused: Its output is not what its folder promised.
    """
    try:
        _check(model, on_device)
    except ModelRefused as refusal:
        precision = model.network.precision
        if precision == "float32":
            raise
        raise ModelRefused(
            f"{model.manifest.name}: precision: expected a network that passes its self-check in "
            f"{precision} on {model.network.device}; got: {refusal}"
        ) from refusal


def _check(model: LoadedModel, on_device: OnDevice) -> None:
    if model.refine is not None:
        _check(model.refine, on_device)
    manifest = model.manifest

    def check_device() -> None:
        field = check_noise(manifest, model.network, model.expected)
        # Where no kernel can be compiled, that shows here and not with the first scan. At this
        # threshold few votes pass, if any.
        filter_votes(field, 1.0)

    on_device(check_device)
    if not manifest.selfcheck.is_phantom:
        return
    phantom = make_phantom(manifest.selfcheck.seed)
    landmarks = Detector(model).detect(phantom.volume, on_device=on_device).landmarks
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    true = [truth.get(landmark.name, np.full(3, np.nan)) for landmark in landmarks]
    check_points(manifest, positions_of(landmarks), np.stack(true))


def _reason(error: Exception, device: torch.device) -> str:
    """Say why loading failed, without paths: the message of an OSError may hold one."""
    if isinstance(error, OSError):
        # safetensors says nothing of what this user may not read.
        return f"expected files to read, got {error.strerror or 'some that this user may not read'}"
    if isinstance(error, InsufficientMemory) or is_out_of_memory(error):
        return f"expected to fit on {device}, ran out of memory"
    first_line = str(error).strip().partition("\n")[0]
    return f"expected to load, got {type(error).__name__}: {first_line:.200}"
