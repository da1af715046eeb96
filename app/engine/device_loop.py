"""Volumes of many requests -> Detections: the event loop's side of one device.

::

    request ─► job ─► work list ─► device's thread ─► answer to all who asked
               │ the same scan in flight: one job for all
               └ deadline, or nobody waits any more: its tiles leave

Identical scans in flight are computed once. Who is late is told so by one timer, set to the
earliest deadline. When nothing is left to do both sides sleep: an idle service never wakes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, Literal, TypeVar

from app.compute import HOST, NamedDevice
from app.engine.batch_sizes import BatchSizes
from app.engine.device_worker import DeviceThread
from app.engine.events import Event, Lost, Prepared, Progressed, Settled, Troubled
from app.engine.jobs import Job, Progress, Waiter, question
from app.engine.metrics import Metrics
from app.engine.work_queue import WorkList
from app.errors import DeadlineExceeded, NotReady
from app.inference import Detection, Detector
from app.io import Volume

logger = logging.getLogger("landmarkd.device")

JOIN_S: Final = 10.0
"""Given to the thread to end a forward pass; one that hangs must not keep the process alive."""

TIMER_STEP_S: Final = 0.001
"""An event loop's clock may be this coarse, and its timers this early."""

Result = TypeVar("Result")


def _nothing() -> None:
    """Do nothing."""


class DeviceLoop:
    """Everything that is asked of one device, and those who wait for it."""

    def __init__(
        self,
        sizes: BatchSizes,
        metrics: Metrics,
        check: Callable[[], None] = _nothing,
        on_lost: Callable[[], None] = _nothing,
        where: NamedDevice = HOST,
    ) -> None:
        """Bring a device's work list and its thread together.

        Args:
            sizes: How many tiles a batch may hold.
            metrics: Where to count.
            check: Raises if the device does not answer as it should; called on its thread.
            on_lost: Is called if the device cannot be used any more.
            where: The device.
        """
        self.sizes = sizes
        self.where = where
        self.trouble: str | None = None
        self.lost = False
        self._metrics = metrics
        self._check = check
        self._on_lost = on_lost
        self._work = WorkList(sizes.size, sizes.cost)
        self._jobs: dict[Hashable, Job] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._thread = self._make_thread()
        self._reviving = self._stopping = False
        self._loop: asyncio.AbstractEventLoop

    @property
    def depth(self) -> int:
        """Count the volumes that wait to be prepared and the tiles that no batch holds yet."""
        return self._work.depth

    @property
    def backlog_s(self) -> float:
        """Estimate how long the device will be busy with the tiles that wait."""
        return self._work.backlog_s

    @property
    def load(self) -> tuple[float, int]:
        """Say in how many seconds the device is free, as far as is known, and how many jobs it has.

        A scan that is not prepared yet has one tile at least.
        """
        unprepared_s = self._work.unprepared * self.sizes.mean_cost
        return self._work.backlog_s + unprepared_s, len(self._jobs)

    def answers(self, asked: Hashable) -> bool:
        """Tell whether a question is being answered already; see ``app.engine.jobs.question``."""
        return asked in self._jobs

    def foresee_s(self, lane: Hashable, tiles: int) -> float:
        """Estimate how long a new scan would take; 0 if tiles like its were never timed."""
        return self._work.foresee_s(lane, tiles) if self.sizes.is_measured(lane) else 0.0

    @property
    def oldest_s(self) -> float:
        """Say how long the oldest job has been without an answer; 0 if there is none."""
        now = time.perf_counter()
        return max((now - job.asked_s for job in self._jobs.values()), default=0.0)

    def start(self) -> None:
        """Begin to take calls and volumes."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; whoever still waits is told."""
        self._stopping = True
        self._fail_all("expected an answer before the service stopped; try again")
        self._work.close()
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Have a function called on the thread that owns the device; from any thread."""
        return self._work.submit(function)

    async def detect(
        self,
        detector: Detector,
        volume: Volume,
        *,
        deadline: float,
        frame: int = 0,
        on_prepared: Callable[[], None] = _nothing,
        watch: Callable[[Progress], None] | None = None,
    ) -> Detection:
        """Bring a volume to the device and wait for its landmarks.

        Cancelling the awaiting task takes the volume's tiles out of the queue, unless somebody
        else waits for the same.

        Args:
            detector: The model to use.
            volume: The scan.
            deadline: Of the event loop's clock, after which the answer is of no use.
            frame: Which frame of its file the volume is; all of them share a digest.
            on_prepared: Is called once the volume need not be kept any more.
            watch: Is told of progress.

        Returns:
            The landmarks and what belongs to them.

        Raises:
            DeadlineExceeded: The deadline has passed.
            NotReady: The device is lost or in trouble, or the loop ends.
            LandmarkdError: As ``Detector.prepare`` and ``app.inference.forward.launch``.
        """
        loop = asyncio.get_running_loop()
        if self.trouble is not None or self._stopping:
            raise NotReady(f"expected a working device, but {self.trouble or 'it is stopping'}")
        waiter = Waiter(loop.create_future(), deadline, on_prepared, watch)
        job = self._join(question(detector.model, volume, frame), detector, volume, waiter)
        self._arm()
        waiter.tell(Progress("queued", ahead=len(self._jobs) - 1, tile=job.run, tiles=job.tiles))
        try:
            return await waiter.answer
        finally:
            self._leave(job, waiter)

    def _join(self, key: Hashable, detector: Detector, volume: Volume, waiter: Waiter) -> Job:
        """Find the job that answers a question already, or make one."""
        job = self._jobs.get(key)
        if job is not None:
            self._metrics.count_shared()
            job.waiters.append(waiter)
            self._work.set_deadline(job)
            waiter.on_prepared()
            return job
        now = time.perf_counter()
        job = Job(key, detector, volume, now, now, [waiter])
        self._jobs[key] = job
        self._thread.add(job)
        return job

    def _leave(self, job: Job, waiter: Waiter) -> None:
        """Forget one who waits no longer, and the job if nobody does."""
        if waiter not in job.waiters:
            return
        job.waiters.remove(waiter)
        if job.wanted:
            self._work.set_deadline(job)
        else:
            self._drop(job, "cancelled")
        self._arm()

    def _drop(self, job: Job, why: Literal["cancelled", "late"]) -> None:
        """Take a job for which nobody waits out of the queue."""
        self._forget(job)
        saved = self._work.remove(job)
        lane = job.detector.lane(job.case) if job.case is not None else None
        self._metrics.count_dropped(why, saved * self.sizes.cost(lane))

    def _forget(self, job: Job) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def _arm(self) -> None:
        """Set the timer to the earliest deadline."""
        deadline = min((job.deadline for job in self._jobs.values()), default=None)
        if self._timer is not None and (deadline is None or self._timer.when() != deadline):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        """Tell those who are late; their tiles leave the queue at once."""
        self._timer = None
        now = asyncio.get_running_loop().time() + TIMER_STEP_S
        for job in self._work.late(now):
            job.expire(now, DeadlineExceeded("expected an answer in time, got none"))
            if job.wanted:
                self._work.set_deadline(job)
            else:
                self._drop(job, "late")
        self._arm()

    def _make_thread(self) -> DeviceThread:
        post, where = self._post, self.where
        return DeviceThread(self._work, self.sizes, self._metrics, self._check, post, where)

    def _post(self, event: Event) -> None:
        """Tell the event loop; called on the device's thread."""
        # A loop that is closed has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hear, event)

    def _hear(self, event: Event) -> None:
        match event:
            case Prepared(job):
                job.prepared()
            case Progressed(job):
                job.tell(Progress("tile", tile=job.run, tiles=job.tiles))
            case Settled(job, result):
                self._settle(job, result)
            case Troubled(reason, recovering):
                self._note_trouble(reason, recovering)
            case Lost(error):
                self._lose(error)

    def _settle(self, job: Job, result: Detection | Exception) -> None:
        self._forget(job)
        self._work.remove(job)
        if isinstance(result, Exception):
            job.fail(result)
        else:
            job.answer(result)
        self._arm()

    def _note_trouble(self, reason: str | None, recovering: bool) -> None:
        self.trouble = reason
        self._reviving = False
        if reason is not None:
            logger.error("device in trouble", extra={"device": self.where.name, "reason": reason})
        if reason is not None and not recovering:
            self._fail_all(f"expected a working device, but {reason}; try another")

    def _lose(self, error: BaseException) -> None:
        """Tell everybody; then try a new thread once, which must pass the self-check."""
        self.trouble = "the device's thread has ended"
        logger.critical("device thread ended", exc_info=error, extra={"device": self.where.name})
        self._metrics.count_faults("thread", 1)
        self._fail_all("expected an answer, but the device's thread ended; try again")
        if self._stopping:
            return
        if self._reviving:
            self.lost = self._stopping = True
            self._work.close()
            self._on_lost()
            return
        self._reviving = True
        self._thread = self._make_thread()
        self._thread.start(doubted=True)

    def _fail_all(self, detail: str) -> None:
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            # Before it is removed: a host thread offers tiles of no job that nobody waits for.
            job.fail(NotReady(detail))
            self._work.remove(job)
        self._arm()
