"""The event loop's side of one device: its scans, their waiters and deadlines, and its health.

Equal requests in flight share a scan. When there is nothing to do, both sides sleep: an idle
service never wakes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Final, Literal, TypeVar

from app.compute import HOST, NamedDevice
from app.engine.active_scans import (
    ActiveScan,
    DetectRequest,
    Progress,
    Told,
    Waiter,
    ignore,
)
from app.engine.batch_sizes import BatchSizes
from app.engine.device_worker import DeviceWorker
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
    """The scans of one device; lives on the event loop. Its thread has not started at first.

    Args:
        self_check: Raises if a model does not answer as it should on this device; called on the
            device's thread.
        on_lost: Called if the device cannot be used any more.

    Attributes:
        index: Of the device among those of the process.
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
        self.device = device
        self.index = index
        self.sizes = sizes
        self.unhealthy_reason: str | None = None
        self.lost = False
        self._metrics = metrics
        self._self_check = self_check
        self._on_lost = on_lost
        self.queue = WorkQueue(sizes.size, sizes.cost, device.passes)
        self._scans: dict[Hashable, ActiveScan] = {}
        self._worker = self._make_worker()
        self._restarting = self._stopping = False
        self._join_until: float | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def load(self) -> tuple[float, int]:
        """Estimated time until the device is free, then the number of its scans.

        A scan that is not prepared yet counts as one tile.
        """
        unprepared_s = self.queue.unprepared * self.sizes.mean_cost
        return self.queue.backlog_s + unprepared_s, len(self._scans)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest scan; 0 without any."""
        now = time.perf_counter()
        return max((now - scan.created_s for scan in self._scans.values()), default=0.0)

    def has_scan(self, key: Hashable) -> bool:
        """Return whether requests of a key are in work here."""
        return key in self._scans

    def start(self) -> None:
        """Start the device's thread; raises as ``DeviceWorker.start``."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()

    async def stop(self) -> None:
        """End the device's thread; whoever still waits gets an error.

        Called again, as when the application ends, it gives the thread no more time.
        """
        self._stopping = True
        self._join_until = self._join_until or asyncio.get_running_loop().time() + JOIN_S
        self._fail_all("expected an answer before the service stopped; try again")
        self.queue.close()
        with suppress(TimeoutError):  # A network that hangs leaves its thread behind.
            async with asyncio.timeout_at(self._join_until):
                while self._worker.is_alive():  # noqa: ASYNC110 - no event tells of its very end
                    await asyncio.sleep(POLL_S)

    def call(self, function: Callable[[], Result], /) -> Result:
        """Have a function called on the device's thread, and wait for its result."""
        return self.queue.submit(function).result()

    async def run(self, request: DetectRequest) -> Detection:
        """Wait for the landmarks of a scan.

        Cancelling the awaiting task takes the scan's tiles out of the queue, unless somebody else
        waits for the same.

        Raises:
            DeadlineExceeded: The deadline has passed.
            NotReady: The device is unhealthy, lost or being stopped.
            LandmarkdError: As ``Detector.passes`` and ``app.inference.launch``.
        """
        if self.unhealthy_reason is not None or self._stopping:
            reason = self.unhealthy_reason or "it is stopping"
            raise NotReady(f"expected a working device, but {reason}")
        loop = asyncio.get_running_loop()
        waiter = Waiter(request, loop.create_future())
        scan = self._join_or_create(waiter)
        why: Literal["cancelled", "late"] = "cancelled"
        try:
            request.on_progress(self._progress_of(scan))
            await asyncio.wait([waiter.future], timeout=request.deadline - loop.time())
            if waiter.future.done():
                return waiter.future.result()
            why = "late"
            raise DeadlineExceeded("expected an answer in time (timeout_s), got none")
        finally:
            self._leave(scan, waiter, why)
            del waiter  # Its future holds the error whose traceback holds this frame.

    def _progress_of(self, scan: ActiveScan) -> Progress:
        if scan.tiles_run:
            return Progress("tile", tile=scan.tiles_run, tiles=scan.tiles)
        return Progress("queued", len(self._scans) - 1, tiles=scan.tiles)

    def _join_or_create(self, waiter: Waiter) -> ActiveScan:
        """Find the scan that computes what is asked, or create one."""
        request = waiter.request
        scan = self._scans.get(request.key)
        if scan is not None:
            self._metrics.shared.inc()
            scan.waiters.append(waiter)
            self.queue.update_deadline(scan)
            return scan
        model = request.model.on(self.index)
        detector = Detector(model, keeps_votes=request.keeps_votes)
        scan = ActiveScan(request, detector.passes(request.volume), [waiter])
        self._scans[request.key] = scan
        self._worker.submit(scan)
        return scan

    def _leave(self, scan: ActiveScan, waiter: Waiter, why: Literal["cancelled", "late"]) -> None:
        """Remove a waiter that has got no answer, and its scan if it was the last."""
        if waiter not in scan.waiters:
            return
        scan.waiters.remove(waiter)
        if scan.has_waiters:
            self.queue.update_deadline(scan)
        else:
            self._drop(scan, why)

    def _drop(self, scan: ActiveScan, why: Literal["cancelled", "late"]) -> None:
        """Take an abandoned scan out of the queue."""
        self._forget(scan)
        saved = self.queue.remove(scan)
        lane = scan.state.lane if scan.state is not None else None
        self._metrics.count_dropped(why, saved * self.sizes.cost(lane))

    def _forget(self, scan: ActiveScan) -> None:
        if self._scans.get(scan.request.key) is scan:
            del self._scans[scan.request.key]

    def _make_worker(self) -> DeviceWorker:
        return DeviceWorker(
            self.device, self.queue, self.sizes, self._metrics, self._self_check, self
        )

    def tell(self, method: Callable[[*Told], None], /, *told: *Told) -> None:
        """Have a method below called on the event loop; called on the worker's threads."""
        # A loop that is closed has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(method, *told)

    def show_progress(self, scan: ActiveScan, /) -> None:
        """Tell all who wait for a scan how far it is."""
        scan.notify_progress(self._progress_of(scan))

    def settle(self, scan: ActiveScan, outcome: Detection | Exception, /) -> None:
        """Answer all who wait for a scan."""
        self._forget(scan)
        self.queue.remove(scan)
        if isinstance(outcome, Exception):
            scan.fail(outcome)
        else:
            scan.resolve(outcome)

    def set_health(self, reason: str | None, /, fail_scans: bool) -> None:
        """Note why the device runs no tiles, or that it does again."""
        self.unhealthy_reason = reason
        self._restarting = False
        if reason is not None:
            extra = {"device": self.device.name, "reason": reason}
            logger.error("device unhealthy", extra=extra)
        else:
            logger.warning("device recovered", extra={"device": self.device.name})
        if fail_scans:
            self._fail_all(f"expected a working device, but {reason}; try another")

    def restart_once(self) -> None:
        """Fail all scans, and replace the worker, once, by one that must pass the self-check."""
        self.unhealthy_reason = "the device's thread has ended"
        self._metrics.faults.labels("thread").inc()
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
        except StartupError as error:
            extra = {"device": self.device.name, "reason": str(error)}
            logger.exception("no thread can start", extra=extra)
            self._lose()

    def _lose(self) -> None:
        self.lost = self._stopping = True
        self.queue.close()
        self._on_lost()

    def _fail_all(self, detail: str) -> None:
        scans, self._scans = list(self._scans.values()), {}
        for scan in scans:
            # Before it is removed: tiles of a scan without waiters cannot be queued any more.
            scan.fail(NotReady(detail))
            self.queue.remove(scan)
