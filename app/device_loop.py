"""Volumes of many requests -> Detections: one device, one thread, batch after batch.

::

    queue ─► prepare ─► scheduler ─► run ─► locate ─► answer
    bounded  └────────── the device's one thread ───────┘

A full queue makes whoever brings a volume wait. One loop takes jobs out and lets the scheduler
decide which tiles of all jobs form the next batch; between two batches the same thread prepares and
locates, so a small scan is never behind a whole huge one. When nothing is left to do the loop waits
at the queue: an idle service never wakes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from app.detector import Case, Detection, Detector, describe, stage_times
from app.errors import NotReady
from app.metrics import Metrics
from app.scheduler import Batch, Scheduler
from app.volume import Volume

logger = logging.getLogger("landmarkd.device")

QUEUED_VOLUMES: Final = 4
"""Decoded volumes that may wait for the device; each may hold gigabytes."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class Job:
    """One request between its decoding and its answer."""

    detector: Detector
    volume: Volume
    deadline: float
    answer: asyncio.Future[Detection]
    decode_s: float
    waiting_since: float
    queue_s: float = 0.0
    case: Case | None = None
    tiles_left: int = 0


class DeviceLoop:
    """The one consumer of a device."""

    def __init__(self, batch_size: int, metrics: Metrics) -> None:
        """Args: most tiles in a batch, and where to count."""
        self.failed = False
        self._metrics = metrics
        self._queue: asyncio.Queue[Job] = asyncio.Queue(QUEUED_VOLUMES)
        self._scheduler = Scheduler[Job](batch_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._jobs: set[Job] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def depth(self) -> int:
        """Count the volumes that wait to be prepared and the tiles that no batch holds yet."""
        return self._queue.qsize() + self._scheduler.waiting_tiles

    def start(self) -> None:
        """Begin to take jobs."""
        self._task = asyncio.create_task(self._serve(), name="device loop")

    async def stop(self) -> None:
        """End the loop and its thread; whoever still waits is told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def call(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Call a function on the thread that owns the device."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def detect(
        self, detector: Detector, volume: Volume, *, deadline: float, decode_s: float
    ) -> Detection:
        """Bring a volume to the device and wait for its landmarks.

        Cancelling the awaiting task takes the volume's tiles out of the queue.

        Args:
            detector: The model to use.
            volume: The scan.
            deadline: ``time.monotonic()`` after which its tiles need not run.
            decode_s: How long decoding took; passed through to the answer.

        Returns:
            The landmarks and what belongs to them.

        Raises:
            LandmarkdError: As ``Detector.prepare`` and ``Detector.run``; NotReady if the loop ends.
        """
        if self.failed:
            raise NotReady("expected a running device loop, got one that failed")
        answer = asyncio.get_running_loop().create_future()
        job = Job(detector, volume, deadline, answer, decode_s, time.perf_counter())
        self._jobs.add(job)
        try:
            await self._queue.put(job)
            return await job.answer
        finally:
            job.answer.cancel()
            self._jobs.discard(job)
            self._scheduler.remove(job)

    async def _serve(self) -> None:
        try:
            while True:
                if not self._scheduler.waiting_tiles:
                    await self._prepare(await self._queue.get())
                elif not self._queue.empty():
                    await self._prepare(self._queue.get_nowait())
                batch = self._scheduler.next_batch(time.monotonic())
                if batch is not None:
                    await self._run(batch)
        except Exception:
            self.failed = True
            self._fail_all()
            logger.exception("device loop failed")
            raise

    async def _prepare(self, job: Job) -> None:
        if job.answer.done():
            return
        with _errors_to([job]):
            start = time.perf_counter()
            job.queue_s = start - job.waiting_since
            job.case = await self.call(job.detector.prepare, job.volume)
            job.tiles_left = len(job.case.plan)
            job.waiting_since = time.perf_counter()
        if job.case is not None and not job.answer.done():
            lane = (job.detector.model.digest, job.case.plan.tile_shape)
            self._scheduler.add(job, lane, job.tiles_left, job.deadline)

    async def _run(self, batch: Batch[Job]) -> None:
        tiles = [(job, index) for job, index in batch.tiles if not job.answer.done()]
        if not tiles:
            return
        for job in dict.fromkeys(job for job, _ in tiles):
            if job.case is not None and not job.case.votes:
                job.queue_s += time.perf_counter() - job.waiting_since
        self._metrics.observe_batch(len(tiles))
        with _errors_to([]) as failure:
            await self.call(_run_tiles, tiles)
        if failure:
            self._metrics.count_fault("batch")
            await self._run_one_by_one(tiles)
        for job, _ in tiles:
            job.tiles_left -= 1
        for job in dict.fromkeys(job for job, _ in tiles):
            if job.tiles_left == 0 and not job.answer.done():
                await self._finish(job)

    async def _run_one_by_one(self, tiles: Sequence[tuple[Job, int]]) -> None:
        """Run a batch that failed again tile by tile: only the guilty request fails."""
        for job, index in tiles:
            if not job.answer.done():
                with _errors_to([job]):
                    await self.call(_run_tiles, [(job, index)])
            if job.answer.done():
                self._scheduler.remove(job)

    async def _finish(self, job: Job) -> None:
        if job.case is None:
            return
        with _errors_to([job]):
            start = time.perf_counter()
            landmarks = await self.call(job.detector.locate, job.case)
            times = stage_times(
                job.case,
                locate_s=time.perf_counter() - start,
                decode_s=job.decode_s,
                queue_s=job.queue_s,
            )
            detection = Detection(
                describe(job.volume), landmarks, job.volume.warnings, len(job.case.plan), times
            )
            if not job.answer.done():
                job.answer.set_result(detection)

    def _fail_all(self) -> None:
        for job in self._jobs:
            if not job.answer.done():
                job.answer.set_exception(
                    NotReady("expected an answer before the service stopped; try again")
                )


def _run_tiles(tiles: Sequence[tuple[Job, int]]) -> None:
    """Run tiles of jobs that share a model."""
    cases = [(job.case, index) for job, index in tiles if job.case is not None]
    tiles[0][0].detector.run(cases)


@contextmanager
def _errors_to(jobs: Sequence[Job]) -> Iterator[list[Exception]]:
    """Hand any error to those who wait for the jobs' answers, and go on.

    Yields:
        A list that holds the error afterwards, if there was one.
    """
    failure: list[Exception] = []
    try:
        yield failure
    except Exception as error:  # noqa: BLE001 - handed to every waiter
        failure.append(error)
        for job in jobs:
            if not job.answer.done():
                job.answer.set_exception(error)
