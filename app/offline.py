"""scan -> answer, in this process: the same answer as the service's, without a service."""

import time
import uuid
from pathlib import Path

from app.detector import Detector
from app.device import choose_device
from app.formats import build_answer, model_ref, timing_of
from app.registry import Registry
from app.schemas import LandmarksAnswer
from app.volume import read_volume


class Offline:
    """Models of a folder, used without a server; each is loaded when it is first asked for."""

    def __init__(self, models_dir: Path, device: str) -> None:
        """Args: the folder of model folders, and the device setting."""
        self._registry = Registry(models_dir, None)
        self._device = choose_device(device)

    def detect(
        self, content: bytes, *, model: str | None = None, frame: int | None = None
    ) -> LandmarksAnswer:
        """Find the landmarks of a scan; see ``Client.detect``."""
        start = time.perf_counter()
        loaded = self._registry.load(model, self._device)
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
