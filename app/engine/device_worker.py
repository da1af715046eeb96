"""The thread of one device, which has its networks run.

::

    submit ─► prepare ─► work queue ─► batch ─► finish ─► settle
              (host)         ▲                  (host)
                             └── another pass ────┘

Scans are prepared and finished on the host pool beside this thread, on CUDA with a stream for each
of its threads. On CUDA, batch n+1 is launched before batch n is collected.

On a CPU, up to ``NamedDevice.passes`` passes run side by side, each on a thread of its own with an
equal share of the cores: a pass alone has all of them. Before each of its convolutions, a pass
takes over its new share if others have come or gone, and gives way to much smaller scans: they run
on the same thread, one within the other. The results are those that scans have alone.

A device whose network runs out of memory ``MAX_CONSECUTIVE_OOM`` times in a row, each time for a
single tile, is unhealthy: it runs no tiles until the models have passed their self-checks again. A
scan that is too large to be prepared says nothing about the device. After an error of the device
itself, such as CUDA's for an illegal access, models are checked, too: where they fail, all that
follows would, so the thread ends, and so does another that cannot pass the checks in its place.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from app.compute import (
    CopyStreams,
    NamedDevice,
    SharedCores,
    adopt_thread_limit,
    is_device_failure,
    record_event,
    release_memory,
    set_device,
    start_thread,
)
from app.engine.active_scans import ActiveScan, Listener
from app.engine.batch_sizes import BatchSizes
from app.engine.host_pool import DaemonThread, HostPool
from app.engine.metrics import Metrics
from app.engine.scheduler import Batch
from app.engine.work_queue import Call, TimedOut, WorkQueue
from app.errors import ClientLeft, InsufficientMemory, StartupError
from app.inference import (
    BatchReport,
    Detection,
    InFlightBatch,
    ScanState,
    collect_batch,
    conclude,
    launch_batch,
    translate_out_of_memory,
)

logger = logging.getLogger("landmarkd.device")

HOST_THREADS: Final = 4
"""Up to this many scans are prepared or finished concurrently; further ones wait."""

MAX_CONSECUTIVE_OOM: Final = 3
"""Tiles in a row that run out of memory before the device itself is checked."""

FIRST_TURN_S: Final = 0.1
"""A batch gives way so long at once; then as long as it has run itself."""

FIRST_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0
"""Time between two self-checks of an unhealthy device; doubled each time."""


class DeviceWorker:
    """One thread that runs what is in a work queue, with a host pool beside it.

    Args:
        self_check: Raises if a model does not answer as it should on this device.
        listener: Is told what happens.
    """

    def __init__(
        self,
        device: NamedDevice,
        queue: WorkQueue,
        sizes: BatchSizes,
        metrics: Metrics,
        self_check: Callable[[], None],
        listener: Listener,
    ) -> None:
        self._device = device
        self._queue = queue
        self._sizes = sizes
        self._metrics = metrics
        self._self_check = self_check
        self._listener, self._tell = listener, listener.tell
        self._consecutive_oom = 0
        self._retry_s: float | None = None
        self._pending: tuple[Batch[ActiveScan], InFlightBatch] | None = None
        self._host_pool = HostPool(f"{device.name} host", HOST_THREADS)
        self._copies = CopyStreams(device.device)
        self._cores = SharedCores()
        self._pass_threads: list[DaemonThread] = []
        self._idle: list[DaemonThread] = []
        self._thread = threading.Thread(target=self._main, name=device.name, daemon=True)

    def start(self, *, self_check_first: bool = False) -> None:
        """Start the thread, and those for passes.

        Args:
            self_check_first: Whether it must pass the self-check before it runs anything.

        Raises:
            StartupError: The system lets none start.
        """
        if self_check_first:
            self._retry_s = 0.0
        try:
            self._start_passes()
            start_thread(self._thread)
        except StartupError:
            self._close_threads()
            raise

    def is_alive(self) -> bool:
        """Return whether one of its threads runs."""
        return self._thread.is_alive() or any(thread.is_alive() for thread in self._pass_threads)

    def submit(self, scan: ActiveScan) -> None:
        """Take a scan from the event loop: prepare it, run its tiles, finish it."""
        self._queue.add(scan)
        self._on_host(scan)

    def _main(self) -> None:
        try:
            adopt_thread_limit()
            set_device(self._device.device)
            if self._retry_s is not None:
                self._self_check()
                self._set_healthy()
            while self._run_next():
                pass
        except BaseException:
            extra = {"device": self._device.name}
            logger.critical("device thread ended", exc_info=True, extra=extra)
            self._tell(self._listener.restart_once)
        finally:
            self._close_threads()

    def _start_passes(self) -> None:
        if not self._device.asynchronous:
            for number in range(min(self._device.passes, self._cores.cores)):
                self._pass_threads.append(DaemonThread(f"{self._device.name} pass {number}"))
            self._idle = [*self._pass_threads]

    def _close_threads(self) -> None:
        """Let the threads beside the device's end."""
        self._host_pool.close()
        for thread in self._pass_threads:
            thread.close()

    def _crash(self, error: BaseException) -> None:
        """End the thread with what was raised on another one, so that all who wait are told."""

        def fail() -> None:
            if threading.current_thread() is self._thread:  # It may have ended, and been replaced.
                raise error

        self._queue.add_call(Call(fail))

    def _run_next(self) -> bool:
        """Do one thing; in a function of its own, or the loop would keep the last scan alive."""
        timeout_s = self._retry_s if self._pending is None else 0.0
        is_busy = not self._device.asynchronous and not self._idle
        work = self._queue.take(timeout_s, calls_only=is_busy or self._retry_s is not None)
        match work:
            case Call():
                self._collect_pending()
                work.function()
            case Batch() if self._device.asynchronous:
                self._launch_next(work)
            case Batch():
                thread = self._idle.pop()
                thread.submit(partial(self._run_beside, work, thread))
            case TimedOut() if self._pending is not None:
                self._collect_pending()
            case TimedOut():
                self._try_to_recover()
        return work is not None

    def _on_host(self, scan: ActiveScan) -> None:
        """Have the next step of a scan taken on the host pool."""

        def call() -> None:
            try:
                self._take_step(scan)
            except BaseException as error:  # noqa: BLE001 - it ends the device's thread
                self._crash(error)

        self._host_pool.submit(call)

    def _take_step(self, scan: ActiveScan) -> None:
        """Prepare a scan's next pass on this thread and queue its tiles, or answer it."""
        try:
            with self._copies.use(), self._cores.share(passes=0):
                outcome = self._advance(scan)
                if isinstance(outcome, ScanState):
                    outcome.grid_ready = record_event(self._device.device)
        except Exception as error:  # noqa: BLE001 - handed to all who wait for the scan
            self._fail(scan, translate_out_of_memory(error, self._device.device))
        else:
            if isinstance(outcome, ScanState):
                self._queue_tiles(scan, outcome)
            elif outcome is not None:
                self._tell(self._listener.settle, scan, outcome)

    def _advance(self, scan: ActiveScan) -> ScanState | Detection | None:
        """Prepare a scan's next pass, or put its answer together; None if it is abandoned."""
        if not scan.has_waiters:
            return None
        if scan.state is None:
            scan.queue_s = time.perf_counter() - scan.created_s
        outcome = next(scan.passes)
        if isinstance(outcome, ScanState):
            return outcome
        return conclude(scan.request.volume, outcome, scan.tiles, queue_s=scan.queue_s)

    def _queue_tiles(self, scan: ActiveScan, state: ScanState) -> None:
        scan.state = state
        scan.tiles += state.tiles
        scan.queued_s = time.perf_counter()
        self._queue.add_tiles(scan, state.lane, state.tiles)
        self._tell(self._listener.show_progress, scan)

    def _launch(
        self, batch: Batch[ActiveScan], give_way: Callable[[], None] | None = None
    ) -> InFlightBatch:
        now = time.perf_counter()
        scans = {scan.state: scan for scan in batch.requests() if scan.state is not None}
        for state, scan in scans.items():
            if scan.queued_s is not None:
                scan.queue_s += now - scan.queued_s
                scan.queued_s = None
                if not scan.tiles_run:  # Of another pass it is neither the size nor the first wait.
                    self._metrics.observe_wait(state.tiles, scan.queue_s)
        tiles = [(scan.state, index) for scan, index in batch.tiles if scan.state is not None]
        return launch_batch(tiles, lambda state: scans[state].has_waiters, give_way)

    def _launch_next(self, batch: Batch[ActiveScan]) -> None:
        """Launch a batch on CUDA, then collect the one before."""
        in_flight = self._launch(batch)
        if self._pending is not None:
            self._collect_pending()
            if in_flight.out_of_memory:  # By itself it may fit.
                in_flight = launch_batch(in_flight.tiles, in_flight.is_active)
        self._pending = batch, in_flight

    def _run_beside(self, batch: Batch[ActiveScan], thread: DaemonThread) -> None:
        """Run a batch on a thread for passes on a CPU."""
        with self._cores.share():
            self._run(batch)
        self._queue.add_call(Call(partial(self._idle.append, thread)))

    def _run(self, batch: Batch[ActiveScan]) -> None:
        """Run a batch on this thread, and tell the device's thread."""
        start_s, start_used_s = time.perf_counter(), self._cores.used_s
        try:
            report = collect_batch(self._launch(batch, self._interruption(batch)))
        except BaseException as error:  # noqa: BLE001 - it ends the device's thread
            # Not raised: it may be within a pass over other scans, which would fail in its place.
            self._queue.end(batch)
            self._crash(error)
            return
        share = (self._cores.used_s - start_used_s) / (time.perf_counter() - start_s)
        report.busy_s *= share
        if report.seconds is not None:
            report.seconds *= share
        self._queue.add_call(Call(partial(self._on_run, batch, report)))

    def _interruption(self, batch: Batch[ActiveScan]) -> Callable[[], None]:
        """Return what a batch on a CPU gives way to between its layers: smaller scans.

        Those that run beside it have all cores, and others run here. They take turns with it, so
        that together they take at most about as long as it does itself. It ends once nobody waits
        for it any more.
        """
        most_s = len(batch.tiles) * self._sizes.cost(batch.lane)
        start_s, others_s = time.perf_counter(), 0.0

        def give_way() -> None:
            nonlocal others_s
            if not any(scan.has_waiters for scan in batch.requests()):
                raise ClientLeft("expected someone to wait for the scan, got nobody")
            own_s = time.perf_counter() - start_s - others_s
            spare_s = min(most_s, FIRST_TURN_S + own_s)
            pause = self._cores.paused()
            others_s += self._queue.wait_for_smaller(batch, spare_s - others_s, pause)
            while smaller := self._queue.take_interrupting(batch, spare_s - others_s):
                turn_s = time.perf_counter()
                self._run(smaller)
                others_s += time.perf_counter() - turn_s
            self._cores.adopt_share()

        return give_way

    def _collect_pending(self) -> None:
        """Wait for the batch that was launched, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._on_run(pending[0], collect_batch(pending[1]))

    def _on_run(self, batch: Batch[ActiveScan], report: BatchReport) -> None:
        """Count a batch that has run, and go on with its scans."""
        self._queue.end(batch)
        if report.tiles:
            self._metrics.observe_batch(report.tiles, self._sizes.size(batch.lane))
        self._metrics.busy.labels(self._device.name).inc(report.busy_s)
        if report.seconds is not None:
            self._sizes.observe(batch.lane, report.tiles, report.seconds)
        if report.max_tiles is not None:
            self._sizes.limit(batch.lane, report.max_tiles)
            extra = {"tiles": report.tiles, "now": report.max_tiles}
            logger.warning("out of memory", extra=extra)
        self._metrics.faults.labels("out-of-memory").inc(report.out_of_memory_count)
        self._metrics.faults.labels("tile").inc(len(report.errors))
        for scan, _ in batch.tiles:
            scan.tiles_run += 1
        for scan in batch.requests():
            if scan.state is not None:
                # Not kept: the tracebacks of the errors hold frames that hold the report.
                self._continue(scan, report.errors.pop(scan.state, None))

    def _continue(self, scan: ActiveScan, error: Exception | None) -> None:
        """Finish a scan whose tiles have all run; fail it if one of them did."""
        if scan.failed:
            return
        if isinstance(error, InsufficientMemory):
            self._queue.add_call(Call(self._count_out_of_memory))
        else:
            self._consecutive_oom = 0
        if error is not None:
            self._fail(scan, error)
        elif scan.tiles_run < scan.tiles:
            self._tell(self._listener.show_progress, scan)
        else:
            self._on_host(scan)

    def _fail(self, scan: ActiveScan, error: Exception) -> None:
        # Removed here and not only by the event loop, so that the next batch has none of its tiles.
        scan.failed = True
        self._queue.remove(scan)
        if is_device_failure(error):
            self._queue.add_call(Call(self._self_check))  # Ends the thread if that fails, too.
        self._tell(self._listener.settle, scan, error)

    def _count_out_of_memory(self) -> None:
        release_memory()
        self._consecutive_oom += 1
        if self._consecutive_oom == MAX_CONSECUTIVE_OOM:
            times = f"{MAX_CONSECUTIVE_OOM} times in a row"
            reason = f"the device ran out of memory {times} and is being checked"
            self._tell(self._listener.set_health, reason, False)
            self._retry_s = FIRST_RETRY_S
            self._try_to_recover()

    def _try_to_recover(self) -> None:
        """Run the self-checks; if they fail, try again later."""
        release_memory()
        try:
            self._self_check()
        except Exception:
            # Whatever it is: a device that fails here must not answer.
            logger.exception("device failed its self-check", extra={"device": self._device.name})
            self._metrics.faults.labels("self-check").inc()
            reason = "the device failed its self-check after running out of memory"
            self._tell(self._listener.set_health, reason, True)
            self._retry_s = min(2 * (self._retry_s or FIRST_RETRY_S), MAX_RETRY_S)
        else:
            self._set_healthy()

    def _set_healthy(self) -> None:
        self._consecutive_oom, self._retry_s = 0, None
        self._tell(self._listener.set_health, None, False)
