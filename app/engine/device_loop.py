"""The event loop's side of one device: its jobs, their waiters and deadlines, and its health.

Equal requests in flight share a job. When there is nothing to do, both sides sleep: an idle service
never wakes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Final, Literal, TypeVar

from app.compute import HOST, NamedDevice
from app.engine.batch_sizes import BatchSizes
from app.engine.device_worker import DeviceWorker
from app.engine.jobs import (
    DetectRequest,
    DeviceEvent,
    HealthChanged,
    Job,
    Progress,
    Progressed,
    Settled,
    Waiter,
    WorkerDied,
    ignore,
)
from app.engine.metrics import Metrics
from app.engine.work_queue import WorkQueue
from app.errors import DeadlineExceeded, NotReady, StartupError
from app.inference import Detection, Detector

logger = logging.getLogger("landmarkd.device")

JOIN_S: Final = 10.0
"""Given to the thread to end a forward pass; one that hangs must not keep the process alive."""

POLL_S: Final = 0.01
"""Between two looks whether it has ended: to wait for it would take another thread."""

Result = TypeVar("Result")


class DeviceLoop:
    """The jobs of one device; lives on the event loop.

    Attributes:
        device: The device.
        index: Of the device among those of the process.
        sizes: Its batch sizes.
        queue: What waits for it.
        unhealthy_reason: Why it runs no tiles; None if it does.
        lost: Whether it cannot be used any more in this process.
    """

    def __init__(
        self,
        sizes: BatchSizes,
        metrics: Metrics,
        self_check: Callable[[], None] = ignore,
        on_lost: Callable[[], None] = ignore,
        device: NamedDevice = HOST,
        index: int = 0,
    ) -> None:
        """Create a work queue and a worker, which has not started.

        Args:
            sizes: Maximum number of tiles in a batch.
            metrics: To count in.
            self_check: Raises if a model does not answer as it should on this device; called on the
                device's thread.
            on_lost: Called if the device cannot be used any more.
            device: The device.
            index: Of the device among those of the process.
        """
        self.device = device
        self.index = index
        self.sizes = sizes
        self.unhealthy_reason: str | None = None
        self.lost = False
        self._metrics = metrics
        self._self_check = self_check
        self._on_lost = on_lost
        self.queue = WorkQueue(sizes.size, sizes.cost, device.passes)
        self._jobs: dict[Hashable, Job] = {}
        self._worker = self._make_worker()
        self._restarting = self._stopping = False
        self._loop: asyncio.AbstractEventLoop

    @property
    def load(self) -> tuple[float, int]:
        """Estimated time until the device is free, then the number of its jobs.

        A scan that is not prepared yet counts as one tile.
        """
        unprepared_s = self.queue.unprepared * self.sizes.mean_cost
        return self.queue.backlog_s + unprepared_s, len(self._jobs)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest job; 0 without any."""
        now = time.perf_counter()
        return max((now - job.created_s for job in self._jobs.values()), default=0.0)

    def has_job(self, key: Hashable) -> bool:
        """Return whether requests of a key are in work here."""
        return key in self._jobs

    def start(self) -> None:
        """Start the device's thread."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()

    async def stop(self) -> None:
        """End the device's thread; whoever still waits gets an error."""
        self._stopping = True
        self._fail_all("expected an answer before the service stopped; try again")
        self.queue.close()
        with suppress(TimeoutError):  # A network that hangs leaves its thread behind.
            async with asyncio.timeout(JOIN_S):
                while self._worker.is_alive():  # noqa: ASYNC110 - no event tells of its very end
                    await asyncio.sleep(POLL_S)

    def call(self, function: Callable[[], Result], /) -> Result:
        """Have a function called on the device's thread, and wait for its result."""
        return self.queue.submit(function).result()

    async def run(self, request: DetectRequest) -> Detection:
        """Wait for the landmarks of a scan.

        Cancelling the awaiting task takes the scan's tiles out of the queue, unless somebody else
        waits for the same.

        Args:
            request: The scan, the model and the callbacks.

        Returns:
            The landmarks and what belongs to them.

        Raises:
            DeadlineExceeded: The deadline has passed.
            NotReady: The device is unhealthy, lost or being stopped.
            LandmarkdError: As ``Detector.passes`` and ``app.inference.launch``.
        """
        if self.unhealthy_reason is not None or self._stopping:
            reason = self.unhealthy_reason or "it is stopping"
            raise NotReady(f"expected a working device, but {reason}")
        waiter = Waiter(request, asyncio.get_running_loop().create_future())
        job = self._join_or_create(waiter)
        request.on_progress(self._progress_of(job))
        why: Literal["cancelled", "late"] = "cancelled"
        try:
            with suppress(TimeoutError):  # Its frames hold the task, which holds what is raised.
                async with asyncio.timeout_at(request.deadline):
                    return await waiter.future
            why = "late"
            raise DeadlineExceeded("expected an answer in time, got none")
        finally:
            self._leave(job, waiter, why)
            del waiter  # Its future holds the error whose traceback holds this frame.

    def _progress_of(self, job: Job) -> Progress:
        if job.tiles_run:
            return Progress("tile", tile=job.tiles_run, tiles=job.tiles)
        return Progress("queued", len(self._jobs) - 1, tiles=job.tiles)

    def _join_or_create(self, waiter: Waiter) -> Job:
        """Find the job that computes what is asked, or create one."""
        request = waiter.request
        job = self._jobs.get(request.key)
        if job is not None:
            self._metrics.count_shared()
            job.waiters.append(waiter)
            self.queue.update_deadline(job)
            return job
        detector = Detector(request.model.on(self.index))
        job = Job(request, detector.passes(request.volume), [waiter])
        self._jobs[request.key] = job
        self._worker.submit(job)
        return job

    def _leave(self, job: Job, waiter: Waiter, why: Literal["cancelled", "late"]) -> None:
        """Remove a waiter that has got no answer, and its job if it was the last."""
        if waiter not in job.waiters:
            return
        job.waiters.remove(waiter)
        if job.has_waiters:
            self.queue.update_deadline(job)
        else:
            self._drop(job, why)

    def _drop(self, job: Job, why: Literal["cancelled", "late"]) -> None:
        """Take an abandoned job out of the queue."""
        self._forget(job)
        saved = self.queue.remove(job)
        lane = job.state.lane if job.state is not None else None
        self._metrics.count_dropped(why, saved * self.sizes.cost(lane))

    def _forget(self, job: Job) -> None:
        if self._jobs.get(job.request.key) is job:
            del self._jobs[job.request.key]

    def _make_worker(self) -> DeviceWorker:
        return DeviceWorker(
            self.device, self.queue, self.sizes, self._metrics, self._self_check, self._emit
        )

    def _emit(self, event: DeviceEvent) -> None:
        """Hand an event to the event loop; called on the worker's threads."""
        # A loop that is closed has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._handle, event)

    def _handle(self, event: DeviceEvent) -> None:
        match event:
            case Progressed(job):
                job.notify_progress(self._progress_of(job))
            case Settled(job, outcome):
                self._settle(job, outcome)
            case HealthChanged(reason, fail_jobs):
                self._set_health(reason, fail_jobs=fail_jobs)
            case WorkerDied():
                self._restart_once()

    def _settle(self, job: Job, outcome: Detection | Exception) -> None:
        self._forget(job)
        self.queue.remove(job)
        if isinstance(outcome, Exception):
            job.fail(outcome)
        else:
            job.resolve(outcome)

    def _set_health(self, reason: str | None, *, fail_jobs: bool) -> None:
        self.unhealthy_reason = reason
        self._restarting = False
        if reason is not None:
            extra = {"device": self.device.name, "reason": reason}
            logger.error("device unhealthy", extra=extra)
        else:
            logger.warning("device recovered", extra={"device": self.device.name})
        if fail_jobs:
            self._fail_all(f"expected a working device, but {reason}; try another")

    def _restart_once(self) -> None:
        """Fail all jobs; replace the worker by one that must pass the self-check, but only once."""
        self.unhealthy_reason = "the device's thread has ended"
        self._metrics.count_faults("thread", 1)
        self._fail_all("expected an answer, but the device's thread ended; try again")
        if self._stopping:
            return
        if self._restarting:
            self._lose()
            return
        self._restarting = True
        try:
            self._worker = self._make_worker()
            self._worker.start(self_check_first=True)
        except (StartupError, RuntimeError):
            logger.exception("no thread can start", extra={"device": self.device.name})
            self._lose()

    def _lose(self) -> None:
        self.lost = self._stopping = True
        self.queue.close()
        self._on_lost()

    def _fail_all(self, detail: str) -> None:
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            # Before it is removed: tiles of a job without waiters cannot be queued any more.
            job.fail(NotReady(detail))
            self.queue.remove(job)
