"""scan -> answer, in this process: the same answer as the service's, without a service."""

import time
import uuid
from functools import partial
from pathlib import Path

from app.compute import choose_device
from app.errors import BadParameter
from app.inference import Detector, build_answer, load_checked, model_ref, timing_of
from app.io import LandmarksAnswer, read_volume
from app.model import LoadedModel, Registry, scan_models


class Offline:
    """Models of a folder, used without a server; each is loaded when it is first asked for."""

    def __init__(self, models_dir: Path, device: str) -> None:
        """Args: the folder of model folders, and the device setting."""
        load = partial(load_checked, device=choose_device(device))
        self._registry = Registry(models_dir, load)
        self._folders = {folder.name: folder for folder in scan_models(models_dir)}

    def detect(
        self, content: bytes, *, model: str | None = None, frame: int | None = None
    ) -> LandmarksAnswer:
        """Find the landmarks of a scan; see ``Client.detect``."""
        start = time.perf_counter()
        loaded = self._load(model)
        volume = read_volume(content, frame=frame)
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
        """Load the model of a name, or the only one, unless it is loaded."""
        if name is None and len(self._folders) != 1:
            raise BadParameter(f"-m: expected one of {', '.join(self._folders)}; got none")
        wanted = name or next(iter(self._folders))
        if wanted not in self._registry.models:
            self._registry.reload(wanted)
        return self._registry.get(wanted)
