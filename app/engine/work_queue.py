"""The queue between the event loop and a device's thread: calls first, then batches of tiles.

All threads meet here, under one lock that is held for microseconds. A batch is chosen at the moment
the device is free, so it holds tiles of all who have come by then and of none who have left. When
there is nothing to do, the device's thread sleeps and nothing wakes it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from app.engine.active_scans import ActiveScan, ignore
from app.engine.scheduler import Batch, Scheduler
from app.errors import NotReady

THREAD_ENDED: Final = "expected a running device thread, got one that ended"


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call on the device's thread.

    Attributes:
        function: Called without arguments. What it raises ends the thread.
        on_refused: Called instead, with the reason, if the queue is closed; all who wait are told
            of that anyway.
    """

    function: Callable[[], None]
    on_refused: Callable[[Exception], None] = ignore


@dataclass(frozen=True, slots=True)
class TimedOut:
    """There was nothing to do until the timeout."""


Result = TypeVar("Result")
Work: TypeAlias = Call | Batch[ActiveScan] | TimedOut | None


class WorkQueue:
    """What waits for one device, in the order of the scheduler's policy."""

    def __init__(
        self,
        batch_size: Callable[[Hashable], int],
        cost: Callable[[Hashable], float],
        batches: int = 1,
    ) -> None:
        """Start empty; the arguments are those of ``Scheduler``."""
        lock = threading.RLock()
        self._changed, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._scheduler = Scheduler[ActiveScan](batch_size, cost, batches=batches)
        self._calls: deque[Call] = deque()
        self._unprepared: set[ActiveScan] = set()
        self._closed = False

    def add_call(self, call: Call) -> None:
        """Add a function that the device's thread calls before anything else."""
        with self._changed:
            closed = self._closed
            if not closed:
                self._calls.append(call)
                self._changed.notify()
        if closed:
            call.on_refused(NotReady(THREAD_ENDED))

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Add a function for the device's thread; the future receives what it returns or raises."""
        future: Future[Result] = Future()

        def call() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - handed to who waits for the future
                future.set_exception(error)
            except BaseException:
                future.set_exception(NotReady("expected an answer, but the device's thread ended"))
                raise
            else:
                future.set_result(result)

        self.add_call(Call(call, future.set_exception))
        return future

    def add(self, scan: ActiveScan) -> None:
        """Add a scan that is being prepared."""
        with self._changed:
            self._scheduler.add(scan, scan.deadline, scan.request.client)
            self._unprepared.add(scan)

    def add_tiles(self, scan: ActiveScan, lane: Hashable, tiles: int) -> None:
        """Add the tiles of a prepared scan, or those of its next pass; not if it is abandoned."""
        with self._changed:
            self._unprepared.discard(scan)
            if scan.has_waiters:
                self._scheduler.add_tiles(scan, lane, tiles)
                self._changed.notify()

    def remove(self, scan: ActiveScan) -> int:
        """Remove a scan, and return how many of its tiles will not be run."""
        with self._changed:
            self._unprepared.discard(scan)
            return self._scheduler.remove(scan)

    def update_deadline(self, scan: ActiveScan) -> None:
        """Take over a scan's deadline after its waiters have changed."""
        with self._changed:
            self._scheduler.set_deadline(scan, scan.deadline)
            self._changed.notify()

    @property
    def waiting_tiles(self) -> int:
        """Number of tiles that no batch has taken yet."""
        with self._changed:
            return self._scheduler.waiting_tiles

    @property
    def unprepared(self) -> int:
        """Number of scans that have no tiles yet."""
        with self._changed:
            return len(self._unprepared)

    @property
    def backlog_s(self) -> float:
        """Estimated time that the waiting tiles take."""
        with self._changed:
            return self._scheduler.backlog

    def estimate_latency_s(self, lane: Hashable, tiles: int, client: str) -> float:
        """Estimate how long a client's new scan of so many tiles would take."""
        with self._changed:
            return self._scheduler.estimate_cost(lane, tiles, client)

    def take(self, timeout_s: float | None = None, *, calls_only: bool = False) -> Work:
        """Wait until there is something to do, and take it.

        Args:
            timeout_s: Seconds to wait at most; None: for ever.
            calls_only: Whether to leave tiles in the queue, as of an unhealthy or busy device.

        Returns:
            A call; else a batch of tiles; TimedOut after ``timeout_s``; None once closed.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                if self._calls:
                    return self._calls.popleft()
                batch = None if calls_only else self._scheduler.next_batch(time.monotonic())
                if batch is not None:
                    return batch
                # Not anew at every notification, or scans that come and go would put off the end.
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return TimedOut()
                self._changed.wait(left_s)
            return None

    def take_interrupting(
        self, running: Batch[ActiveScan], spare_s: float
    ) -> Batch[ActiveScan] | None:
        """Take tiles to run before the end of a batch that runs, as the scheduler's policy has it.

        Returns:
            Tiles that probably take no longer than ``spare_s``; None if none need to run now.
        """
        with self._changed:
            if self._closed:
                return None
            return self._scheduler.interrupting_batch(running, spare_s, time.monotonic())

    def end(self, batch: Batch[ActiveScan]) -> None:
        """Note that a batch has run."""
        with self._changed:
            self._scheduler.end(batch)
            self._ended.notify_all()

    def wait_for_smaller(
        self, running: Batch[ActiveScan], spare_s: float, pause: AbstractContextManager[None]
    ) -> float:
        """Wait within ``pause`` while a batch runs beside one of requests that cost much less.

        Not once the queue is closed: nobody tells it then that a batch has run.

        Returns:
            How many seconds it waited, about ``spare_s`` at most.
        """
        with self._changed:
            if spare_s <= 0 or not self._is_beside_smaller(running):
                return 0.0
            start_s = now = time.monotonic()
            with pause:
                end_s = start_s + spare_s
                while self._is_beside_smaller(running) and now < end_s:
                    self._ended.wait(end_s - now)
                    now = time.monotonic()
            return now - start_s

    def _is_beside_smaller(self, running: Batch[ActiveScan]) -> bool:
        return not self._closed and self._scheduler.is_beside_smaller(running)

    def close(self) -> None:
        """Make ``take`` return None, and refuse the calls that wait."""
        with self._changed:
            self._closed = True
            calls, self._calls = self._calls, deque()
            self._changed.notify()
            self._ended.notify_all()
        for call in calls:
            call.on_refused(NotReady(THREAD_ENDED))
