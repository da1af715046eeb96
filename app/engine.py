"""bytes of many requests -> Detections: models, admission and decoding around the device loop.

::

    admit ─► decode ─► device loop ─► answer
    429,413  threads   one per device
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeVar

import torch

from app.admission import Admission
from app.detector import Detection, Detector, load_checked
from app.device import choose_device
from app.device_loop import DeviceLoop
from app.errors import DeadlineExceeded, NotReady
from app.metrics import Metrics
from app.registry import LoadedModel, Registry
from app.settings import Settings
from app.volume import VolumeLimits, read_volume

logger = logging.getLogger("landmarkd.engine")

DECODE_THREADS: Final = 2
"""Inflating releases the interpreter's lock, so two volumes decode at once."""

COMPUTE_THREADS: Final = 2
"""Work that needs no device; each piece may hold gigabytes, so the rest waits its turn."""

State = Literal["loading", "running", "draining"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the service can answer.

    Attributes:
        ready: True when at least one model can answer.
        reason: Why not, or ``ready``.
        models: ``ready`` or why not, by model name.
    """

    ready: bool
    reason: str
    models: dict[str, str]


class Engine:
    """Everything between a request's bytes and its answer, for one device."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Args: settings of the process, and where to count.

        Raises:
            StartupError: The device asked for is not there.
        """
        self.device = choose_device(settings.device)
        self.registry = Registry(
            settings.models_dir, partial(load_checked, device=self.device), settings.default_model
        )
        self.admission = Admission(
            settings.max_in_flight, settings.max_queued_bytes, settings.max_body_bytes
        )
        self._settings = settings
        self._metrics = metrics
        self.limits = VolumeLimits(
            inflated_bytes=settings.max_inflated_bytes,
            voxels=settings.max_voxels,
            axis=settings.max_axis,
        )
        self._state: State = "loading"
        self._device_loop = DeviceLoop(settings.batch_size, metrics)
        self._decoders = ThreadPoolExecutor(DECODE_THREADS, thread_name_prefix="decode")
        self._computers = ThreadPoolExecutor(COMPUTE_THREADS, thread_name_prefix="compute")

    @property
    def in_flight(self) -> int:
        """Count the requests that are admitted and not yet answered."""
        return self.admission.requests

    @property
    def queue_depth(self) -> int:
        """Count the volumes that wait to be prepared and the tiles that no batch holds yet."""
        return self._device_loop.depth

    def admit(self, content_length: int | None) -> AbstractContextManager[None]:
        """Hold a place for a request; see ``Admission.admit``."""
        return self.admission.admit(content_length)

    def readiness(self) -> Readiness:
        """Say whether requests can be answered, and why not."""
        models = dict.fromkeys(self.registry.models, "ready") | dict(self.registry.refusals)
        if self._state == "loading":
            reason = "models are being loaded"
        elif self._state == "draining":
            reason = "the service is stopping"
        elif self._device_loop.failed:
            reason = "the device loop has failed"
        else:
            reason = "ready" if self.registry.models else "no usable model"
        return Readiness(ready=reason == "ready", reason=reason, models=models)

    async def start(self) -> None:
        """Load and check all models, then begin to answer; a bad model is only recorded."""
        if self._settings.threads:
            torch.set_num_threads(self._settings.threads)
        await self._device_loop.call(self.registry.load_all)
        for name, reason in self.registry.refusals.items():
            logger.error("model refused", extra={"model": name, "reason": reason})
        self._device_loop.start()
        self._state = "running"

    async def reload(self, name: str) -> None:
        """Load a model's folder again and swap it in if it passes its self-check.

        Raises:
            UnknownModel: There is no such folder.
            ModelRefused: The folder breaks the contract; the model that was there stays.
        """
        await self._device_loop.call(self.registry.reload, name)

    async def stop(self) -> None:
        """Refuse what comes, answer what was accepted (for at most ``drain_s``), and end."""
        self._state = "draining"
        self.admission.open = False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                await self.admission.idle.wait()
        await self._device_loop.stop()
        for threads in (self._decoders, self._computers):
            threads.shutdown(wait=False, cancel_futures=True)

    async def detect(
        self, content: bytes, model: LoadedModel, *, frame: int | None, timeout_s: float | None
    ) -> Detection:
        """Find the landmarks in an uploaded file.

        Cancelling the awaiting task takes the request's tiles out of the queue.

        Args:
            content: The file.
            model: Of ``registry``; it answers even if it is swapped meanwhile.
            frame: Which frame of a 4D file.
            timeout_s: Seconds after which nobody waits for the answer; None for the default.

        Returns:
            The landmarks and what belongs to them.

        Raises:
            LandmarkdError: See the tree in ``app.errors``.
        """
        if self._state == "loading":
            raise NotReady("expected a ready service, got one that is loading its models")
        limit = min(timeout_s or self._settings.timeout_s, self._settings.max_timeout_s)
        try:
            async with asyncio.timeout(limit):
                return await self._detect(content, Detector(model), frame, limit)
        except TimeoutError:
            raise DeadlineExceeded(f"expected an answer within {limit:g} s, got none") from None

    async def compute(
        self, work: Callable[[Callable[[], None]], T], *, timeout_s: float | None
    ) -> T:
        """Do work that needs no model and no device, on a thread of its own.

        Args:
            work: Is given a function to call now and then, which raises as soon as nobody waits
                for the result any more.
            timeout_s: Seconds after which nobody does; None for the default.

        Returns:
            What the work returns.

        Raises:
            DeadlineExceeded: It took longer.
            LandmarkdError: What the work raises.
        """
        limit = min(timeout_s or self._settings.timeout_s, self._settings.max_timeout_s)
        abandoned = threading.Event()

        def go_on() -> None:
            if abandoned.is_set():
                raise DeadlineExceeded("expected somebody to wait for the answer, got nobody")

        try:
            async with asyncio.timeout(limit):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._computers, work, go_on)
        except TimeoutError:
            raise DeadlineExceeded(f"expected an answer within {limit:g} s, got none") from None
        finally:
            abandoned.set()

    async def _detect(
        self, content: bytes, detector: Detector, frame: int | None, limit: float
    ) -> Detection:
        start = time.perf_counter()
        deadline = time.monotonic() + limit
        volume = await asyncio.get_running_loop().run_in_executor(
            self._decoders, read_volume, content, self.limits, frame
        )
        decode_s = time.perf_counter() - start
        self._metrics.observe_volume(volume.voxels.size)
        detection = await self._device_loop.detect(
            detector, volume, deadline=deadline, decode_s=decode_s
        )
        times = detection.timing
        self._metrics.observe_stages(times)
        self.admission.learn((times.prepare + times.network + times.vote + times.locate) / 1e3)
        return detection
