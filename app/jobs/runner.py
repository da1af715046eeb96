"""Runs queued scans: as the engine's client that is in no hurry, a few at a time.

A scan counts as running from before its file is opened until its outcome is kept. So a process that
is killed meanwhile leaves it behind as such, and the next one runs it again: alone, because it may
be what killed the process, and no more than ``MAX_ATTEMPTS`` times.

A scan whose model is not loaded waits until it is, in this process or a later one, and holds up
none of another model. A scan of an archive for which the disk has no room waits until it has, and
holds up no other.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from app.compute import start_executor
from app.engine import BACKGROUND, Engine, FairBudget, Metrics, Progress
from app.errors import GivenUp, NotReady, NotStored, UnknownModel
from app.inference import answer_scan
from app.io import HEAD_BYTES, LandmarksAnswer, Problem
from app.jobs.folder import JobFolder
from app.jobs.records import Claim, KeptJob, Tiles
from app.jobs.store import JobStore
from app.jobs.uploads import UploadStore

logger = logging.getLogger(__name__)

CONCURRENCY: Final = 2
"""While one scan is decoded or finished, another keeps the device busy."""

MAX_ATTEMPTS: Final = 3

NO_HURRY_S: Final = 365 * 86_400.0
"""Time limit of a scan. It waits for interactive requests, however many there are."""

RETRY_S: Final = 1.0
"""Between attempts while no device works, or the disk takes nothing."""

ASIDE_S: Final = 60.0
"""For which other scans come before those that the disk has no room for."""

LOGGED_ATTEMPTS: Final = 60
"""Of as many attempts that the disk refuses, one is logged: the log on that disk would fill it."""

CALLING: Final = 2
"""Calls of clients that a thread has, one to do and one to do next."""

WRITING: Final = 2
"""Files that are written at once; with one, clients could not take turns."""

T = TypeVar("T")
Describe = Callable[[BaseException, str], Problem]
"""Makes a problem of an error, and the id of the request that it belongs to."""


@dataclass(slots=True)
class _Run:
    """What runs a scan, and how far it is."""

    task: "asyncio.Task[LandmarksAnswer]"
    tiles: Tiles = (0, 0)


class JobRunner:
    """The jobs of a folder, and what runs them; for one event loop.

    Attributes:
        store: The jobs; its methods are called by ``call``.
        uploads: What is to become jobs; likewise.
    """

    def __init__(
        self, folder: JobFolder, engine: Engine, metrics: Metrics, describe: Describe
    ) -> None:
        self.store = JobStore(folder)
        self.uploads = UploadStore(folder)
        self._folder = folder
        self._engine = engine
        self._metrics = metrics
        self._describe = describe
        # What takes long, because files are written, has threads of its own.
        self._pool = start_executor("jobs", 1)
        self._file_pool = start_executor("job files", WRITING + CONCURRENCY)
        self._calling, self._writing = FairBudget(CALLING), FairBudget(WRITING)
        self._runs: dict[Claim, _Run] = {}
        self._changed = asyncio.Event()
        # In words, as errors would keep the archives open: removed, these would give no room.
        self._refused: str | None = None  # Why the disk takes nothing at all now.
        self._aside: dict[Claim, str] = {}  # Why scans had no room on the disk.
        self._last_owner = ""
        metrics.watch("job_scans_queued", "Scans of jobs that wait.", lambda: folder.usage.queued)
        metrics.watch("job_bytes", "Kept of jobs and their scans.", lambda: folder.usage.bytes)
        metrics.watch("uploads", "Unfinished uploads.", lambda: folder.usage.uploads)
        metrics.watch(
            "upload_bytes", "Of job_bytes, unfinished uploads.", lambda: folder.usage.upload_bytes
        )

    async def call(self, client: str, function: Callable[[], T]) -> T:
        """Call a method of the store for a client, one that does not block for long."""
        return await _in_turn(self._calling, client, self._pool, function)

    async def write(self, client: str, function: Callable[[], T]) -> T:
        """Call a method of the store that writes files for a client."""
        return await _in_turn(self._writing, client, self._file_pool, function)

    async def accept(self, client: str, keep: Callable[[], T]) -> T:
        """Have a job of a client kept, and then run; raises as ``keep``, which may have kept it."""
        try:
            return await self.write(client, keep)
        finally:
            self._changed.set()

    def cancel(self, job: str) -> None:
        """End the runs of a job that was removed."""
        for claim, run in self._runs.items():
            if claim.job == job:
                run.task.cancel()

    def resume(self) -> None:
        """Run what has waited for a model, which was loaded now."""
        self._changed.set()

    def why_waits(self, job: KeptJob) -> str | None:
        """Say why no scan of a job can run now, or one cannot; None if all can, or are settled."""
        if job.finished_s is not None:
            return None
        state = self._engine.readiness()
        if not state.ready:
            return state.reason
        try:
            self._engine.registry.get(job.model)
        except UnknownModel as error:
            return str(error)
        kept = list(self._aside.items())  # Threads of a pool ask while it changes.
        aside = (reason for claim, reason in kept if claim.job == job.id)
        refused = self._refused or next(aside, None)
        return f"{refused}; it is tried again" if refused else None

    def progress(self) -> dict[int, Tiles]:
        """Return how far the scans are that are running, by their ids."""
        return {claim.id: run.tiles for claim, run in self._runs.items()}

    async def run(self) -> None:
        """Run what is queued until this is cancelled; then what is running is queued again."""
        try:
            async with asyncio.TaskGroup() as group:
                # At once: the models of what is queued may never be loaded again.
                group.create_task(self._sweep())
                group.create_task(self._log_waiting())
                while (claim := await self._claim(suspect=True)) is not None:
                    await self._run(claim)
                for _ in range(CONCURRENCY):
                    group.create_task(self._work())
        except asyncio.CancelledError:
            # After what the pool's one thread does now, which may be to claim a scan. Where the
            # disk takes nothing, the next start does it.
            loop = asyncio.get_running_loop()
            with contextlib.suppress(NotStored):
                await loop.run_in_executor(self._pool, self.store.release_all)
            raise

    async def close(self) -> None:
        """Give the folder back, once ``run`` has ended."""
        # On the pool's one thread: outcomes that are being kept come first, and no other may start.
        for close in (self._file_pool.shutdown, self._folder.close):
            await asyncio.get_running_loop().run_in_executor(self._pool, close)
        self._pool.shutdown(wait=False)

    async def _log_waiting(self) -> None:
        """Tell the operator of scans whose model is not loaded: perhaps it will never be again."""
        await self._engine.loaded.wait()
        waiting = await self._insist(partial(self.store.waiting, self._engine.registry.names))
        for model, scans in waiting.items():
            fields = {"model": model, "scans": scans}
            logger.warning("jobs wait for a model that is not loaded", extra=fields)

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            claim = await self._claim()
            if claim is None:
                await self._changed.wait()
            else:
                self._changed.set()  # There may be more, for others that wait.
                await self._run(claim)

    async def _sweep(self) -> None:
        """Remove jobs when their time has passed."""
        # Uploads first: on a full disk their files give room to what else is to be written.
        stores = self.uploads, self.store
        while True:
            waits = await self._insist(lambda: [one.sweep() for one in stores])
            # A job that finishes while this waits has the same time to live, so it is not before.
            wait_s = min((one for one in waits if one is not None), default=self._folder.ttl_s)
            await asyncio.sleep(max(wait_s, RETRY_S))

    async def _claim(self, *, suspect: bool = False) -> Claim | None:
        if not self._folder.usage.queued:
            return None
        while not self._engine.readiness().ready:  # noqa: ASYNC110 - there is no event of that
            await asyncio.sleep(RETRY_S)
        names = self._engine.registry.names
        aside = [claim.id for claim in self._aside]
        claim = await self._insist(
            partial(self.store.claim, names, self._last_owner, aside, suspect=suspect)
        )
        self._last_owner = claim.order.owner if claim else ""
        return claim

    async def _run(self, claim: Claim) -> None:
        """Run a scan, and keep what became of it."""
        task = asyncio.create_task(self._find(claim))
        self._runs[claim] = _Run(task)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del self._runs[claim]
        keep = self._outcome(claim, task)
        del task  # Its error holds the scan, and the disk may take nothing for long.
        if keep is not None:
            # What waits for its turn is kept, too, if the service stops: it is not found again.
            await asyncio.shield(self._insist(keep))

    def _outcome(
        self, claim: Claim, task: "asyncio.Task[LandmarksAnswer]"
    ) -> Callable[[], object] | None:
        """Say what to do in the store about a run that has ended; None: nothing."""
        stopping = not self._engine.admission.open
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or (error is not None and stopping):
            # The job was removed, or the service stops, which has all that failed then tried again.
            return None
        if error is None:
            self._count("ok", 200, claim)
            return partial(self.store.settle, claim, "done", task.result().model_dump_json())
        if isinstance(error, NotStored):
            self._set_aside(claim, str(error))
            return partial(self.store.release, claim, tried=False)
        if isinstance(error, NotReady):
            return partial(self.store.release, claim)
        if isinstance(error, UnknownModel):
            # A reload came between, as the claim may wait for the disk: it waits for the model.
            return partial(self.store.release, claim, tried=False)
        problem = self._describe(error, claim.order.request_id)
        self._count(problem.code, problem.status, claim)
        return partial(self.store.settle, claim, "failed", problem.model_dump_json())

    def _set_aside(self, claim: Claim, reason: str) -> None:
        """Have all other scans come before one, for a while."""
        if not self._aside:
            fields = {**_ids(claim), "reason": reason}
            logger.warning("the disk has no room for a scan of a job", extra=fields)
            asyncio.get_running_loop().call_later(ASIDE_S, self._take_back)
        self._aside[claim] = reason

    def _take_back(self) -> None:
        self._aside.clear()
        self._changed.set()

    def _count(self, code: str, status: int, claim: Claim) -> None:
        self._metrics.job_scans.labels(code).inc()
        fields = {**_ids(claim), "code": code, "attempts": claim.attempts}
        level = logging.INFO if status < 500 else logging.WARNING  # As of a request.
        logger.log(level, "scan of a job", extra=fields)

    async def _insist(self, function: Callable[[], T]) -> T:
        """Call a method of the store, again and again until the disk takes what it writes."""
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            try:
                result = await loop.run_in_executor(self._pool, function)
            except NotStored as error:
                self._refused = str(error)
                if attempt % LOGGED_ATTEMPTS == 0:
                    logger.exception("the folder of jobs takes nothing; trying again")
                attempt += 1
                await asyncio.sleep(RETRY_S)
            else:
                self._refused = None
                return result

    async def _find(self, claim: Claim) -> LandmarksAnswer:
        """Find the landmarks of a scan."""
        if claim.attempts > MAX_ATTEMPTS:
            raise GivenUp(
                f"expected a scan that the service survives, got one that was in work each of "
                f"{MAX_ATTEMPTS} times that it ended or lost its devices; it is not tried again"
            )
        start_s = time.perf_counter()
        model = self._engine.registry.get(claim.order.model)
        loop = asyncio.get_running_loop()
        content = await loop.run_in_executor(self._file_pool, self._open, claim)
        read_ms = 1e3 * (time.perf_counter() - start_s)
        detection = await self._engine.detect(
            content,
            model,
            selection=claim.order.selection,
            timeout_s=NO_HURRY_S,
            client=BACKGROUND,
            on_progress=partial(self._note_progress, claim),
        )
        return answer_scan(
            detection,
            model,
            request_id=claim.order.request_id,
            receive_ms=read_ms,
            start_s=start_s,
            candidates=claim.order.candidates,
        )

    def _open(self, claim: Claim) -> memoryview:
        content = self._folder.files.open(claim.job, claim.entry, self._engine.max_body_bytes)
        bytes(content[:HEAD_BYTES])  # Read from the disk here; the event loop looks at it.
        return content

    def _note_progress(self, claim: Claim, progress: Progress) -> None:
        self._runs[claim].tiles = progress.tile, progress.tiles


def _ids(claim: Claim) -> dict[str, str]:
    """For a log line: who asks for a scan that is missing names its job."""
    return {"request_id": claim.order.request_id, "job": claim.job}


async def _in_turn(
    budget: FairBudget, client: str, pool: ThreadPoolExecutor, function: Callable[[], T]
) -> T:
    """Call a function on a thread; clients take turns, however many calls one of them has."""
    loop = asyncio.get_running_loop()
    async with budget.hold(1, client, loop.time() + NO_HURRY_S):
        return await loop.run_in_executor(pool, function)
