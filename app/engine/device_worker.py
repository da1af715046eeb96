"""A device's work -> votes and landmarks: the only thread that runs networks on the device.

::

    prepare ─► work list ─► batch ─► finish ─► answer
    (aside)       ▲                  (aside)
                  └── a second look ───┘

Scans are prepared and finished in threads beside this one, on a CUDA device by a stream of their
own. Such a device is given a batch before the thread waits for the votes of the one before, so it
never waits for the host.

Memory that runs out three times in a row, each time for a single tile, means that the device is
unwell: nothing is answered then until the models have passed their self-checks again.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from app.compute import CopyStream, NamedDevice, record_event, release_memory, set_device
from app.engine.batch_sizes import BatchSizes
from app.engine.events import Event, Lost, Prepared, Progressed, Settled, Troubled
from app.engine.host_pool import Aside
from app.engine.jobs import Job
from app.engine.metrics import Metrics
from app.engine.scheduler import Batch
from app.engine.work_queue import Call, Rest, WorkList
from app.errors import InsufficientMemory
from app.inference import (
    Detection,
    InFlightBatch,
    ScanState,
    collect_batch,
    describe,
    launch_batch,
    stage_times,
    translate_out_of_memory,
)
from app.voting import Landmark

logger = logging.getLogger("landmarkd.device")

SHORTAGES: Final = 3
"""Single tiles in a row that do not fit, after which the device itself is in doubt."""

FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0
"""Between two self-checks of a device that is in trouble; doubled each time."""


@dataclass(frozen=True, slots=True)
class Departed:
    """A batch that the device was given, and whose it is."""

    batch: Batch[Job]
    jobs: dict[ScanState, Job]
    flight: InFlightBatch


class DeviceThread:
    """One thread for one device."""

    def __init__(
        self,
        work: WorkList,
        sizes: BatchSizes,
        metrics: Metrics,
        check: Callable[[], None],
        post: Callable[[Event], None],
        where: NamedDevice,
    ) -> None:
        """Args: what to do, tiles of a batch, where to count, the self-check, whom to tell, where.

        A device's name is also that of its thread.
        """
        self._work = work
        self._sizes = sizes
        self._metrics = metrics
        self._check = check
        self._post = post
        self._shortages = 0
        self._retry_s: float | None = None
        self._where = where
        self._departed: Departed | None = None
        self._aside = Aside(work)
        self._copies = CopyStream(where.device)
        self._thread = threading.Thread(target=self._main, name=where.name, daemon=True)

    def start(self, *, doubted: bool = False) -> None:
        """Begin to work; with a self-check if the device is in doubt."""
        if doubted:
            self._retry_s = 0.0
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end; a network that hangs is left behind with it."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            set_device(self._where.device)
            if self._retry_s is not None:
                self._check()
                self._recovered()
            self._serve()
        except BaseException as error:  # noqa: BLE001 - handed to everybody who waits
            self._post(Lost(error))
        finally:
            self._aside.close()

    def add(self, job: Job) -> None:
        """Take a scan from the event loop: it is prepared, run and finished."""
        self._work.add(job)
        self._aside.do(partial(self._prepare, job), partial(self._go_on_with, job))

    def _serve(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Do one thing; apart from the loop, which would hold the last scan until the next came."""
        patience_s = self._retry_s if self._departed is None else 0.0
        work = self._work.take(patience_s, calls_only=self._retry_s is not None)
        match work:
            case Call():
                self._land()
                work.function()
            case Batch():
                self._run(work)
            case Rest() if self._departed is not None:
                self._land()
            case Rest():
                self._recover()
        return work is not None

    def _prepare(self, job: Job) -> ScanState | None:
        """Bring a scan to the device, unless nobody waits for it any more."""
        volume, job.volume = job.volume, None
        if volume is None or not job.wanted:
            return None
        job.queue_s = time.perf_counter() - job.since_s
        with self._copies.use():
            case = job.detector.prepare(volume)
            case.grid_ready = record_event(self._where.device)
        return case

    def _go_on_with(self, job: Job, case: ScanState | Exception | None) -> None:
        """Queue the tiles of a scan that was prepared."""
        if isinstance(case, Exception):
            self._fail(job, translate_out_of_memory(case, self._where.device))
        elif case is not None:
            self._offer(job, case)
            self._post(Prepared(job))

    def _offer(self, job: Job, case: ScanState) -> None:
        job.case = case
        job.tiles += len(case.plan)
        job.since_s = time.perf_counter()
        self._work.offer(job, job.detector.lane(case), len(case.plan))

    def _run(self, batch: Batch[Job]) -> None:
        """Give the device a batch, then wait for the one before."""
        now = time.perf_counter()
        jobs = {job.case: job for job in batch.requests() if job.case is not None}
        for case, job in jobs.items():
            if not case.started:
                case.started = True
                job.queue_s += now - job.since_s
                self._metrics.observe_wait(len(case.plan), job.queue_s)
        tiles = [(job.case, index) for job, index in batch.tiles if job.case is not None]
        self._metrics.observe_batch(len(tiles), self._sizes.size(batch.lane))
        flight = launch_batch(tiles, lambda case: jobs[case].wanted)
        if self._departed is not None:
            self._land()
            if flight.out_of_memory:  # By itself it may fit.
                flight = launch_batch(tiles, flight.is_active)
        self._departed = Departed(batch, jobs, flight)
        if not self._where.asynchronous:
            self._land()

    def _land(self) -> None:
        """Wait for the batch that the device was given, if there is one."""
        departed, self._departed = self._departed, None
        if departed is None:
            return
        batch, report = departed.batch, collect_batch(departed.flight)
        self._metrics.observe_busy(self._where.name, report.busy_s)
        if report.seconds is not None:
            self._sizes.observe(batch.lane, report.tiles, report.seconds)
        if report.max_tiles is not None:
            self._sizes.limit(batch.lane, report.max_tiles)
            logger.warning("out of memory", extra={"tiles": report.tiles, "now": report.max_tiles})
        self._metrics.count_faults("out-of-memory", report.out_of_memory_count)
        self._metrics.count_faults("tile", len(report.errors))
        for job, _ in batch.tiles:
            job.run += 1
        for case, job in departed.jobs.items():
            self._after(case, job, report.errors.get(case))

    def _after(self, case: ScanState, job: Job, error: Exception | None) -> None:
        """Go on with a job some of whose tiles have run."""
        if job.failed:
            return
        if error is not None:
            self._fail(job, error)
            return
        self._shortages = 0
        if job.run < job.tiles:
            self._post(Progressed(job))
        elif job.wanted:
            self._aside.do(partial(self._finish, case, job), partial(self._end, case, job))

    def _finish(self, case: ScanState, job: Job) -> tuple[Landmark, ...] | ScanState:
        """Read landmarks off a scan's votes, or plan a further look."""
        with self._copies.use():
            found = job.detector.finish(case)
            if isinstance(found, ScanState):
                found.grid_ready = record_event(self._where.device)
        return found

    def _end(
        self, case: ScanState, job: Job, found: tuple[Landmark, ...] | ScanState | Exception
    ) -> None:
        """Answer a scan that was finished, or look again."""
        if isinstance(found, Exception):
            self._fail(job, translate_out_of_memory(found, self._where.device))
        elif isinstance(found, ScanState):
            self._offer(job, found)
            self._post(Progressed(job))
        else:
            self._post(Settled(job, _detection(job, case, found)))

    def _fail(self, job: Job, error: Exception) -> None:
        # Here and not only by who is told, so that the next batch has none of its tiles.
        job.failed = True
        self._work.remove(job)
        self._post(Settled(job, error))
        if isinstance(error, InsufficientMemory):
            self._work.add_call(Call(self._count_shortage))
        else:
            self._shortages = 0

    def _count_shortage(self) -> None:
        release_memory()
        self._shortages += 1
        if self._shortages == SHORTAGES:
            reason = f"the device ran out of memory {SHORTAGES} times in a row and is being checked"
            self._post(Troubled(reason, recovering=True))
            self._retry_s = FIRST_RETRY_S
            self._recover()

    def _recover(self) -> None:
        """Run the self-checks; the device goes on if they pass, else rests and tries again."""
        release_memory()
        try:
            self._check()
        except Exception:
            # Whatever it is: a device that fails here must not answer.
            logger.exception("device failed its self-check", extra={"device": self._where.name})
            self._metrics.count_faults("self-check", 1)
            reason = "the device failed its self-check after running out of memory"
            self._post(Troubled(reason))
            self._retry_s = min(2 * (self._retry_s or FIRST_RETRY_S), LAST_RETRY_S)
        else:
            self._recovered()

    def _recovered(self) -> None:
        self._shortages, self._retry_s = 0, None
        self._post(Troubled(None))
        logger.warning("device recovered", extra={"device": self._where.name})


def _detection(job: Job, case: ScanState, landmarks: tuple[Landmark, ...]) -> Detection:
    times = stage_times(case, queue_s=job.queue_s)
    volume = case.volume
    return Detection(describe(volume), landmarks, volume.warnings, job.tiles, times)
