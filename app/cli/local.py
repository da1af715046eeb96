"""Finds landmarks in this process, with the settings and the answers of the service."""

import time
import uuid
from functools import partial

import torch

from app.compute import choose_devices
from app.errors import BadParameter
from app.inference import Detector, build_answer, load_checked, model_ref, timing_of
from app.io import LandmarksAnswer, VolumeLimits, read_volume
from app.model import LoadedModel, Registry, scan_models
from app.settings import Settings


def first_device(settings: Settings) -> torch.device:
    """Return the first of the service's devices.

    Raises:
        StartupError: This machine has no such device.
    """
    return choose_devices(settings.device)[0].device


def make_registry(settings: Settings) -> Registry:
    """Make a registry that loads models as the service does, on the first of its devices.

    Args:
        settings: The service's; ``threads`` applies to this process from now on.

    Returns:
        The registry; no model is loaded yet.

    Raises:
        StartupError: This machine has no such device.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    load = partial(
        load_checked,
        device=first_device(settings),
        precision=settings.precision,
        allow_torchscript=settings.allow_torchscript,
    )
    return Registry(settings.models_dir, load, settings.default_model)


class LocalDetector:
    """Models of a folder, used without a service; each is loaded when it is first needed.

    Args:
        settings: The service's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._registry = make_registry(settings)
        self._limits = VolumeLimits(
            inflated_bytes=settings.max_inflated_bytes,
            voxels=settings.max_voxels,
            axis=settings.max_axis,
        )

    def detect(
        self, content: bytes, *, model: str | None = None, frame: int | None = None
    ) -> LandmarksAnswer:
        """Find the landmarks of a scan.

        Args:
            content: A NIfTI file, plain or gzip.
            model: Name of the model; None for the default model, or for the only one.
            frame: Which frame of a 4D file, from 0.

        Returns:
            The answer, with the candidates of every landmark.

        Raises:
            LandmarkdError: As the service would refuse the scan.
        """
        start = time.perf_counter()
        loaded = self._load(model)
        volume = read_volume(content, self._limits, frame)
        decoded = time.perf_counter()
        detection = Detector(loaded).detect(volume, decode_s=decoded - start)
        total_ms = 1e3 * (time.perf_counter() - start)
        return build_answer(
            detection,
            model=model_ref(loaded),
            request_id=uuid.uuid4().hex,
            timing=timing_of(detection, receive_ms=0.0, total_ms=total_ms),
            candidates=True,
        )

    def _load(self, name: str | None) -> LoadedModel:
        chosen = name or self._settings.default_model
        if chosen is None:
            names = [folder.name for folder in scan_models(self._settings.models_dir)]
            if len(names) != 1:
                known = ", ".join(names) or "none"
                raise BadParameter(f"-m: expected the name of a model; found: {known}")
            chosen = names[0]
        if chosen not in self._registry.models:
            self._registry.reload(chosen)
        return self._registry.get(chosen)
