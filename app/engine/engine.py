"""The engine: loads models, admits requests, decodes scans and gives them to a device.

The package's docstring shows the threads and the way of a request through them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import torch

from app.compute import HOST, HeapTrimmer, choose_devices, limit_threads, total_memory
from app.engine.active_scans import DetectRequest, Progress, ignore
from app.engine.admission import CLIENT_SHARE, Admission, AdmittedRequest
from app.engine.devices import Devices
from app.engine.fair_budget import FairBudget, Reservation
from app.engine.host_pool import HostPool, run_in_daemon_thread
from app.engine.metrics import Metrics
from app.errors import DeadlineExceeded, NotReady, TooLarge
from app.inference import Detection, Forecast, forecast, load_checked, self_check
from app.io import (
    ONLY,
    SEARCH_BYTES,
    Content,
    ReadinessAnswer,
    Selection,
    Volume,
    VolumeLimits,
    check_start,
    is_dicom,
    read_volume,
)
from app.model import LoadedModel, Registry
from app.settings import Settings

logger = logging.getLogger("landmarkd.engine")

COMPUTE_THREADS: Final = 3
"""For work without a model; each piece may take gigabytes. One client leaves one to others."""

DECODE_SLOTS: Final = 4
"""For scans that are decoded or prepared; one for each processor, if these are more."""

LARGE_BYTES: Final = 128 << 20
"""A scan that takes more memory is large."""

LARGE_SLOTS: Final = 2
"""For these, and those looked for in archives: one client's leave threads to others' small ones."""

BODY_PART: Final = 4
"""One part in so many of the memory is for the bodies of requests: scans take several times more
once they are decoded."""

T = TypeVar("T")
Work: TypeAlias = Callable[[Callable[[], None]], T]
"""Given ``check_cancelled``, to be called now and then: see ``HostPool.run``."""


class Engine:
    """Everything between the bytes of a request and its detection.

    Args:
        on_lost: Called if no device can be used any more.

    Attributes:
        admission: The bounds of what is in progress.
        limits: Of the scans.
        max_body_bytes: Maximum size of a request's body.
        memory: What requests take besides their bodies.
        loaded: Set once it is known which models can be used at the start.

    Raises:
        StartupError: A device of the settings does not exist, or the system lets no thread start.
    """

    def __init__(
        self, settings: Settings, metrics: Metrics, on_lost: Callable[[], None] = ignore
    ) -> None:
        limit_threads(settings.threads)
        self.devices = Devices(
            choose_devices(settings.device),
            settings.batch_size,
            metrics,
            self._self_check,
            on_lost,
        )
        self.registry = Registry(settings.models_dir, self._load, settings.default_model)
        self._compute_pool = HostPool("compute", COMPUTE_THREADS)
        self._heap_trimmer = HeapTrimmer(self._compute_pool.submit)
        memory = settings.memory or total_memory(HOST.device) // 2
        bodies = memory // BODY_PART
        self.max_body_bytes = min(settings.max_body_bytes, int(CLIENT_SHARE * bodies))
        self.admission = Admission(
            settings.max_in_flight,
            bodies,
            lambda: self.devices.backlog_s,
            lambda: self.devices.healthy_count,
            self._heap_trimmer.schedule,
        )
        self.limits = VolumeLimits.of(settings)
        self._settings = settings
        self._metrics = metrics
        self.loaded = asyncio.Event()
        self.memory = FairBudget(memory - bodies, CLIENT_SHARE)
        self._loading = asyncio.Lock()
        self._reloads: dict[str, asyncio.Task[None]] = {}
        slots = max(DECODE_SLOTS, torch.get_num_threads())
        self._decode_slots = FairBudget(slots, CLIENT_SHARE)
        self._compute_slots = FairBudget(COMPUTE_THREADS, 1 - 1 / COMPUTE_THREADS)
        self._decode_pool = HostPool("decode", slots // 2)
        self._watch()

    def _watch(self) -> None:
        """Add the gauges of the metrics."""
        watch, admission = self._metrics.watch, self.admission
        watch("ready", "1 if new requests are accepted.", lambda: float(self.readiness().ready))
        watch("requests_in_flight", "Requests accepted, unanswered.", lambda: admission.requests)
        parts = {"bodies": admission.body_bytes, "work": self.memory}
        used = {part: partial(getattr, budget, "used") for part, budget in parts.items()}
        limit = {part: partial(getattr, budget, "limit") for part, budget in parts.items()}
        watch("memory_bytes", "Of LANDMARKD_MEMORY, what requests hold.", used, "part")
        watch("memory_limit_bytes", "Of LANDMARKD_MEMORY, what they may hold.", limit, "part")
        watch("memory_waiting", "Requests that wait for memory.", lambda: self.memory.waiting)

    def readiness(self) -> ReadinessAnswer:
        """Return whether requests can be answered, and why not."""
        models = dict.fromkeys(self.registry.models, "ready") | dict(self.registry.refusals)
        unhealthy = self.devices.unhealthy_reason
        if not self.admission.open:
            reason = "the service is stopping"
        elif not self.loaded.is_set():
            reason = "models are being loaded"
        elif unhealthy is not None and not self.devices.healthy_count:
            reason = unhealthy
        elif not self.registry.models:
            reason = "no usable model"
        else:
            reason = "ready" if unhealthy is None else f"ready, but not on {unhealthy}"
            return ReadinessAnswer(ready=True, reason=reason, models=models)
        return ReadinessAnswer(ready=False, reason=reason, models=models)

    def choose_model(self, name: str | None) -> LoadedModel:
        """Find the model that a request asks for; raises as ``Registry.get``, or NotReady."""
        state = self.readiness()
        if not state.ready:
            raise NotReady(f"expected a ready service, got one that is not: {state.reason}")
        return self.registry.get(name)

    async def start(self) -> None:
        """Load and check all models, then accept requests, unless it is stopped meanwhile.

        Raises:
            StartupError: The system lets no thread start, or as ``Registry.load_all``.
            NotReady: No thread can start to load the models, or all devices are lost meanwhile.
        """
        self.devices.start()
        try:
            async with self._loading:
                await run_in_daemon_thread(self.registry.load_all)
        except NotReady:
            # The devices' threads have ended: no failure if that was asked for.
            if self.admission.open:
                raise
        for name, reason in self.registry.refusals.items():
            logger.error("model refused", extra={"model": name, "reason": reason})
        self.loaded.set()

    async def reload(self, name: str) -> None:
        """Load a model's folder again; swap it in if it passes its self-check on every device.

        One folder is loaded at a time; those who ask for one that waits its turn share the load.

        Raises:
            UnknownModel: There is no such folder; a model that was loaded from it serves no more.
            ModelRefused: The folder breaks the contract; the model that was there stays.
            NotReady: No thread can start to load it; likewise.
        """
        task = self._reloads.get(name)
        if task is None:
            task = self._reloads[name] = asyncio.create_task(self._reload(name))
        await asyncio.shield(task)

    async def _reload(self, name: str) -> None:
        async with self._loading:
            # From now on the folder is read: whoever asks later may mean a newer state of it.
            del self._reloads[name]
            await run_in_daemon_thread(partial(self.registry.reload, name))

    def close(self) -> None:
        """Refuse new requests from now on."""
        self.admission.open = False

    async def stop(self, *, at_once: bool = False) -> None:
        """Refuse new requests, answer the admitted ones (for at most ``drain_s``), and end."""
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if at_once else self._settings.drain_s):
                await self.admission.idle.wait()
        await self.devices.stop()
        self._heap_trimmer.stop()
        self._decode_pool.close()
        self._compute_pool.close()

    def precheck(
        self,
        head: Content,
        model: LoadedModel,
        *,
        selection: Selection = ONLY,
        timeout_s: float,
        client: str = "",
        heatmaps: int = 0,
    ) -> Forecast | None:
        """Refuse a file by its header, before the rest of it is received; DICOM is refused later.

        ``head`` is the file's first ``HEAD_BYTES``, or all of it; all else is as for ``detect``.

        Returns:
            What the scan will take; None of DICOM.

        Raises:
            RequestError: As ``read_volume``, where the header tells enough.
            TooLarge: It would need more memory than all scans may take together.
            DeadlineExceeded: What is queued and its own tiles would take longer than allowed.
        """
        if is_dicom(head):
            check_start(head)
            return None
        needs = self._forecast(head, model, selection, heatmaps)
        self._check_in_time(needs, timeout_s, client)
        return needs

    def _check_in_time(self, needs: Forecast, timeout_s: float, client: str) -> None:
        latency_s = self.devices.estimate_latency_s(needs.lane, needs.tiles, client)
        if latency_s > timeout_s:
            raise DeadlineExceeded(
                f"expected a scan that can be answered within {timeout_s:g} s, got {needs.tiles} "
                f"tiles, which would take {latency_s:.1f} s with what is queued"
            )

    async def detect(  # noqa: PLR0913 - what a request may ask for
        self,
        content: Content,
        model: LoadedModel,
        *,
        selection: Selection = ONLY,
        needs: Forecast | None = None,
        timeout_s: float,
        client: str = "",
        on_progress: Callable[[Progress], None] = ignore,
        heatmaps: int = 0,
        admitted: AdmittedRequest | None = None,
    ) -> Detection:
        """Find the landmarks in an uploaded file; cancelling takes its tiles out of the queue.

        Args:
            content: The file.
            model: Of ``registry``; it is used even if it is swapped meanwhile.
            selection: Which scan of a file that holds several.
            needs: As ``precheck`` returned.
            timeout_s: Seconds after which nobody waits for the answer.
            client: Who waits: clients share memory, decoding and devices evenly.
            on_progress: Called with the progress of the scan.
            heatmaps: How many are made of the detection's votes, which it has then.
            admitted: The request that makes them; it holds memory for all that until it ends.

        Raises:
            LandmarkdError: Any kind of ``app.errors``.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        look = partial(self._forecast, content, model, selection, heatmaps)
        needs = needs or await self._look(look, content, client, deadline)
        slots = LARGE_SLOTS if needs.memory > LARGE_BYTES else 1
        async with (
            nullcontext(await admitted.hold(self.memory, needs.memory, deadline))
            if admitted
            else self.memory.hold(needs.memory, client, deadline) as memory,
            self._decode_slots.hold(slots, client, deadline) as slot,
        ):
            volume, decode_ms = await self._decode(content, selection, deadline, memory)
            progress = partial(self._note_progress, slot, on_progress)
            request = DetectRequest(model, volume, deadline, selection.frame or 0,
                on_progress=progress, client=client, keeps_votes=heatmaps > 0)  # fmt: skip
            with self.memory.hold_while_used(memory, volume.voxels):
                detection = await self.devices.choose(request.key).run(request)
        self._metrics.observe_stages(times := replace(detection.timing, decode=decode_ms))
        self.admission.observe_cost(times.busy_ms / 1e3)
        return replace(detection, timing=times)

    async def compute(
        self,
        work: Work[T],
        *,
        admitted: AdmittedRequest,
        memory: int | None,
        result_bytes: Callable[[T], int] = lambda _: 0,
        timeout_s: float | None = None,
    ) -> T:
        """Do work that needs no model and no device, on a host thread.

        Args:
            work: Given ``check_cancelled``, to be called now and then, which raises once nobody
                waits for the result any more.
            admitted: The request that waits; the result is kept as long as it is in progress.
            memory: Bytes that the work takes, its result included; None: what ``detect`` holds for
                the request.
            result_bytes: Returns how many of these its result takes.
            timeout_s: As for ``detect``; None: the setting of that name.

        Raises:
            TooLarge: It would need more memory than all requests may take together.
            DeadlineExceeded: It took longer.
            LandmarkdError: Raised by the work.
        """
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + limit_s
        if memory is not None:
            self._check_memory(memory)
            await admitted.hold(self.memory, memory, deadline)
        if (held := admitted.memory) is None:
            raise ValueError("expected work that memory is held for, got none")
        async with self._compute_slots.hold(1, admitted.client, deadline):
            result = await self._run(self._compute_pool, work, deadline, held)
        self.memory.release(held, keep=result_bytes(result))
        return result

    async def _run(self, pool: HostPool, work: Work[T], deadline: float, memory: Reservation) -> T:
        """Do work on a pool; its memory is held until no thread does it, even if it is given up."""
        run = partial(work)  # Threads have no other reference to what this call does.
        with self.memory.hold_while_used(memory, run):
            return await pool.run(run, deadline)

    async def _look(
        self, look: Work[Forecast], content: Content, client: str, deadline: float
    ) -> Forecast:
        """Forecast a scan; one that may be among many files takes too long for the event loop."""
        if not is_dicom(content):
            return look(ignore)
        self._check_memory(SEARCH_BYTES)
        async with (
            self.memory.hold(SEARCH_BYTES, client, deadline) as memory,
            self._decode_slots.hold(LARGE_SLOTS, client, deadline),
        ):
            needs = await self._run(self._decode_pool, look, deadline, memory)
        self._check_in_time(needs, deadline - asyncio.get_running_loop().time(), client)
        return needs

    def _note_progress(
        self, slot: Reservation, on_progress: Callable[[Progress], None], progress: Progress
    ) -> None:
        if progress.tiles:  # It is prepared.
            self._decode_slots.release(slot)
        on_progress(progress)

    async def _decode(
        self, content: Content, selection: Selection, deadline: float, memory: Reservation
    ) -> tuple[Volume, float]:
        """Read a scan, for which memory is held; gives also how long that took, in ms."""
        start = time.perf_counter()
        read = partial(read_volume, content, self.limits, selection)
        volume = await self._run(self._decode_pool, read, deadline, memory)
        self._metrics.voxels.observe(volume.voxels.size)
        return volume, 1e3 * (time.perf_counter() - start)

    def _forecast(
        self,
        head: Content,
        model: LoadedModel,
        selection: Selection,
        heatmaps: int,
        check_cancelled: Callable[[], None] = ignore,
    ) -> Forecast:
        """Say what a scan will take; refuse one that takes more memory than there may be."""
        needs = forecast(head, self.limits, model, selection, heatmaps, check_cancelled)
        self._check_memory(needs.memory)
        return needs

    def _check_memory(self, needed: int) -> None:
        if needed > self.memory.limit:
            limit = f"expected a request that takes at most {self.memory.limit >> 20} MiB of memory"
            got = f"got one that takes {needed >> 20} MiB"
            raise TooLarge(f"{limit}, {got}; the operator's limit is 3/4 of LANDMARKD_MEMORY")

    def _load(self, folder: Path) -> LoadedModel:
        """Load a model folder on all devices."""
        precision, allow = self._settings.precision, self._settings.allow_torchscript
        load = partial(load_checked, folder, precision=precision, allow_torchscript=allow)
        return self.devices.load(load)

    def _self_check(self, device_index: int) -> None:
        """Run the self-checks of all models on one device; called on its thread."""
        for model in self.registry.models.values():
            self_check(model.on(device_index))
