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
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeVar

import torch

from app.admission import Admission
from app.batch_sizes import BatchSizes
from app.detector import Detection, Detector
from app.device import choose_device, memory_room
from app.device_loop import DeviceLoop
from app.errors import DeadlineExceeded, NotReady
from app.grid import foresee_shape
from app.inflate import Content
from app.jobs import Progress
from app.loading import check_again, load_checked
from app.metrics import Gauges, Metrics
from app.places import Place
from app.registry import LoadedModel, Registry
from app.settings import Settings
from app.tiles import plan_tiles
from app.volume import Volume, VolumeLimits, check_header, read_volume

logger = logging.getLogger("landmarkd.engine")

DECODE_THREADS: Final = 2
"""Inflating releases the interpreter's lock, so two volumes decode at once."""

QUEUED_VOLUMES: Final = 4
"""Volumes that are decoded or wait for the device at once; each may hold gigabytes."""

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

    def __init__(
        self, settings: Settings, metrics: Metrics, on_lost: Callable[[], None] | None = None
    ) -> None:
        """Make an engine that has not started.

        Args:
            settings: Of the process.
            metrics: Where to count.
            on_lost: Is called if the device cannot be used any more.

        Raises:
            StartupError: The device asked for is not there.
        """
        self.device = choose_device(settings.device)
        self.registry = Registry(
            settings.models_dir, partial(load_checked, device=self.device), settings.default_model
        )
        self.admission = Admission(
            settings.max_in_flight,
            settings.max_queued_bytes,
            settings.max_body_bytes,
            lambda: self._device_loop.backlog_s,
        )
        self._settings = settings
        self._metrics = metrics
        self.limits = VolumeLimits(
            inflated_bytes=settings.max_inflated_bytes,
            voxels=settings.max_voxels,
            axis=settings.max_axis,
        )
        self._state: State = "loading"
        self.sizes = BatchSizes(settings.batch_size, partial(memory_room, self.device))
        self._device_loop = DeviceLoop(
            self.sizes, metrics, self._check_models, on_lost or (lambda: None)
        )
        self._places = asyncio.Semaphore(QUEUED_VOLUMES)
        self._decoders = ThreadPoolExecutor(DECODE_THREADS, thread_name_prefix="decode")
        self._computers = ThreadPoolExecutor(COMPUTE_THREADS, thread_name_prefix="compute")

    def gauges(self) -> Gauges:
        """Say what there is to read about the present."""
        return Gauges(
            queue_depth=lambda: self._device_loop.depth,
            in_flight=lambda: self.admission.requests,
            queue_age_s=lambda: self._device_loop.oldest_s,
            batch_size=lambda: self.sizes.largest,
            ready=lambda: self.readiness().ready,
        )

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
        elif self._device_loop.trouble is not None:
            reason = self._device_loop.trouble
        else:
            reason = "ready" if self.registry.models else "no usable model"
        return Readiness(ready=reason == "ready", reason=reason, models=models)

    async def start(self) -> None:
        """Load and check all models, then begin to answer; a bad model is only recorded."""
        if self._settings.threads:
            torch.set_num_threads(self._settings.threads)
        self._device_loop.start()
        await self._device_loop.call(self.registry.load_all)
        for name, reason in self.registry.refusals.items():
            logger.error("model refused", extra={"model": name, "reason": reason})
        self._state = "running"

    async def reload(self, name: str) -> None:
        """Load a model's folder again and swap it in if it passes its self-check.

        Raises:
            UnknownModel: There is no such folder.
            ModelRefused: The folder breaks the contract; the model that was there stays.
        """
        await self._device_loop.call(self.registry.reload, name)

    def close(self) -> None:
        """Refuse what comes from now on."""
        self._state = "draining"
        self.admission.open = False

    async def stop(self) -> None:
        """Refuse what comes, answer what was accepted (for at most ``drain_s``), and end."""
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                await self.admission.idle.wait()
        await self._device_loop.stop()
        for threads in (self._decoders, self._computers):
            threads.shutdown(wait=False, cancel_futures=True)

    def look(
        self, head: Content, model: LoadedModel, *, frame: int | None, timeout_s: float | None
    ) -> None:
        """Refuse a file by its header, before the rest of it is received.

        Args:
            head: The file's first ``HEAD_BYTES``, or all of it.
            model: The one that is asked.
            frame: As for ``detect``.
            timeout_s: As for ``detect``.

        Raises:
            RequestError: As ``read_volume``, where the header is enough to tell.
            DeadlineExceeded: What is queued and its own tiles take longer, as was measured.
        """
        header = check_header(head, self.limits, frame)
        manifest = model.manifest
        shape = foresee_shape(header.shape, header.affine, manifest.input)
        plan = plan_tiles(shape, manifest.input, manifest.network.output_stride)
        needed = self._device_loop.foresee_s((model.digest, plan.tile_shape), len(plan))
        limit = self._limit(timeout_s)
        if needed > limit:
            raise DeadlineExceeded(
                f"expected a scan that can be answered within {limit:g} s, got {len(plan)} tiles, "
                f"which would take {needed:.1f} s with what is queued"
            )

    def _limit(self, timeout_s: float | None) -> float:
        return min(timeout_s or self._settings.timeout_s, self._settings.max_timeout_s)

    async def detect(
        self,
        content: Content,
        model: LoadedModel,
        *,
        frame: int | None,
        timeout_s: float | None,
        watch: Callable[[Progress], None] | None = None,
    ) -> Detection:
        """Find the landmarks in an uploaded file.

        Cancelling the awaiting task takes the request's tiles out of the queue.

        Args:
            content: The file.
            model: Of ``registry``; it answers even if it is swapped meanwhile.
            frame: Which frame of a 4D file.
            timeout_s: Seconds after which nobody waits for the answer; None for the default.
            watch: Is told of progress.

        Returns:
            The landmarks and what belongs to them.

        Raises:
            LandmarkdError: See the tree in ``app.errors``.
        """
        if self._state == "loading":
            raise NotReady("expected a ready service, got one that is loading its models")
        deadline = asyncio.get_running_loop().time() + self._limit(timeout_s)
        place = Place(self._places)
        try:
            await place.take(deadline)
            start = time.perf_counter()
            volume = await self._decode(content, frame, deadline)
            decode_s = time.perf_counter() - start
            detection = await self._device_loop.detect(
                Detector(model),
                volume,
                deadline=deadline,
                frame=frame or 0,
                on_prepared=place.leave,
                watch=watch,
            )
        finally:
            place.leave()
        detection = replace(detection, timing=replace(detection.timing, decode=1e3 * decode_s))
        times = detection.timing
        self._metrics.observe_stages(times)
        self.admission.learn((times.prepare + times.network + times.vote + times.locate) / 1e3)
        return detection

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
        limit = self._limit(timeout_s)
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

    async def _decode(self, content: Content, frame: int | None, deadline: float) -> Volume:
        """Read a scan on a thread of its own."""
        read = partial(read_volume, content, self.limits, frame)
        try:
            async with asyncio.timeout_at(deadline):
                volume = await asyncio.get_running_loop().run_in_executor(self._decoders, read)
        except TimeoutError:
            raise DeadlineExceeded("expected the scan to be read in time, it was not") from None
        self._metrics.observe_volume(volume.voxels.size)
        return volume

    def _check_models(self) -> None:
        """Run the self-checks of all models again; called on the device's thread."""
        for name, model in self.registry.models.items():
            check_again(self._settings.models_dir / name, model)
