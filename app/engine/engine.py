"""bytes of many requests -> Detections: models, admission and decoding around the devices.

::

    admit ─► decode ─► devices ─► answer
    429,413  threads   a loop for each
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import torch

from app.compute import choose_devices
from app.engine.admission import Admission
from app.engine.computing import Computing
from app.engine.devices import Devices, call_apart
from app.engine.heap_trim import Tidying
from app.engine.jobs import Progress
from app.engine.metrics import Gauges, Metrics
from app.engine.places import Place
from app.errors import DeadlineExceeded, NotReady
from app.inference import Detection, check_again, load_checked
from app.io import Content, Volume, VolumeLimits, check_header, read_volume
from app.model import LoadedModel, Registry
from app.preprocessing import grid_shape, plan_tiles
from app.settings import Settings

logger = logging.getLogger("landmarkd.engine")

DECODE_THREADS: Final = 2
"""Inflating releases the interpreter's lock, so two volumes decode at once."""

QUEUED_VOLUMES: Final = 4
"""Volumes that are decoded or wait for the device at once; each may hold gigabytes."""

State = Literal["loading", "running", "draining"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the service can answer.

    Attributes:
        ready: True when at least one model can answer, on at least one device.
        reason: Why not, or ``ready``; which devices are out, if others work.
        models: ``ready`` or why not, by model name.
    """

    ready: bool
    reason: str
    models: dict[str, str]


class Engine:
    """Everything between a request's bytes and its answer."""

    def __init__(
        self, settings: Settings, metrics: Metrics, on_lost: Callable[[], None] | None = None
    ) -> None:
        """Make an engine that has not started.

        Args:
            settings: Of the process.
            metrics: Where to count.
            on_lost: Is called if no device can be used any more.

        Raises:
            StartupError: A device asked for is not there.
        """
        self.devices = Devices(
            choose_devices(settings.device),
            settings.batch_size,
            metrics,
            self._check_models,
            on_lost or (lambda: None),
        )
        self.registry = Registry(settings.models_dir, self._load, settings.default_model)
        self.admission = Admission(
            settings.max_in_flight,
            settings.max_queued_bytes,
            settings.max_body_bytes,
            lambda: self.devices.backlog_s,
            lambda: self.devices.working,
        )
        self._settings = settings
        self._metrics = metrics
        self.limits = VolumeLimits(
            inflated_bytes=settings.max_inflated_bytes,
            voxels=settings.max_voxels,
            axis=settings.max_axis,
        )
        self._state: State = "loading"
        self._places = asyncio.Semaphore(QUEUED_VOLUMES)
        self._tidying = Tidying()
        self._decoders = ThreadPoolExecutor(DECODE_THREADS, thread_name_prefix="decode")
        self._computing = Computing()

    def gauges(self) -> Gauges:
        """Say what there is to read about the present."""
        return Gauges(
            queue_depth=lambda: self.devices.depth,
            in_flight=lambda: self.admission.requests,
            queue_age_s=lambda: self.devices.oldest_s,
            batch_sizes=self.devices.batch_sizes(),
            ready=lambda: self.readiness().ready,
        )

    @contextmanager
    def admit(self, content_length: int | None) -> Iterator[None]:
        """Hold a place for a request, see ``Admission.admit``, and tidy up some time after it."""
        with self.admission.admit(content_length):
            try:
                yield
            finally:
                self._tidying.after_work()

    def readiness(self) -> Readiness:
        """Say whether requests can be answered, and why not."""
        models = dict.fromkeys(self.registry.models, "ready") | dict(self.registry.refusals)
        if self._state == "loading":
            reason = "models are being loaded"
        elif self._state == "draining":
            reason = "the service is stopping"
        elif self.devices.trouble is not None:
            reason = self.devices.trouble
        elif not self.registry.models:
            reason = "no usable model"
        else:
            out = self.devices.complaint
            return Readiness(True, "ready" if out is None else f"ready, but not on {out}", models)
        return Readiness(False, reason, models)

    async def start(self) -> None:
        """Load and check all models, then begin to answer; a bad model is only recorded."""
        if self._settings.threads:
            torch.set_num_threads(self._settings.threads)
        self.devices.start()
        await call_apart(self.registry.load_all)
        for name, reason in self.registry.refusals.items():
            logger.error("model refused", extra={"model": name, "reason": reason})
        self._state = "running"

    async def reload(self, name: str) -> None:
        """Load a model's folder again and swap it in if it passes its self-check on every device.

        Raises:
            UnknownModel: There is no such folder.
            ModelRefused: The folder breaks the contract; the model that was there stays.
        """
        await call_apart(partial(self.registry.reload, name))

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
        await self.devices.stop()
        self._tidying.stop()
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self._computing.close()

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
        shape = grid_shape(header.shape, header.affine, manifest.input)
        plan = plan_tiles(shape, manifest.input, manifest.network.output_stride)
        needed = self.devices.foresee_s((model.digest, plan.tile_shape), len(plan))
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
            detection = await self.devices.detect(
                model,
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
        return await self._computing.do(work, self._limit(timeout_s))

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

    def _load(self, folder: Path) -> LoadedModel:
        """Load a model folder on all devices."""
        precision = self._settings.precision
        return self.devices.load(partial(load_checked, folder, precision=precision))

    def _check_models(self, place: int) -> None:
        """Run the self-checks of all models again on one device; called on its thread."""
        for name, model in self.registry.models.items():
            check_again(self._settings.models_dir / name, model.on(place))
