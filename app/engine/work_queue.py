"""Calls, scans and tiles that wait -> what the device's thread does next.

The one place where the event loop and the device's thread meet: one lock, held for microseconds.
The next batch is chosen at the moment the device is free, so it holds whoever came until then and
nobody who left. Where there is nothing to do, the thread sleeps and nothing wakes it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from app.engine.jobs import Job
from app.engine.scheduler import Batch, Scheduler
from app.errors import NotReady

ENDED: Final = "expected a running device thread, got one that ended"


def _unheard(_reason: Exception) -> None:
    """Tell nobody: whoever waits hears of the thread's end anyway."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call on the device's thread.

    Attributes:
        function: Is called without arguments; raises nothing.
        refuse: Is called in its place with the reason if the thread ends before.
    """

    function: Callable[[], None]
    refuse: Callable[[Exception], None] = _unheard


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing came within the time that the thread was willing to wait."""


Result = TypeVar("Result")
Work: TypeAlias = Call | Batch[Job] | Rest | None


class WorkList:
    """What waits for the device, in the order of the scheduler's policy."""

    def __init__(
        self, batch_size: Callable[[Hashable], int], cost: Callable[[Hashable], float]
    ) -> None:
        """Args: as the scheduler's."""
        self._changed = threading.Condition()
        self._scheduler = Scheduler[Job](batch_size, cost)
        self._calls: deque[Call] = deque()
        self._unprepared: set[Job] = set()
        self._closed = False

    def add_call(self, call: Call) -> None:
        """Add a function that the thread shall call before anything else."""
        with self._changed:
            closed = self._closed
            if not closed:
                self._calls.append(call)
                self._changed.notify()
        if closed:
            call.refuse(NotReady(ENDED))

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Add a function that returns or raises something, which the future hands on."""
        answer: Future[Result] = Future()

        def work() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - handed to who waits
                answer.set_exception(error)
            except BaseException:
                answer.set_exception(NotReady("expected an answer, but the device's thread ended"))
                raise
            else:
                answer.set_result(result)

        self.add_call(Call(work, answer.set_exception))
        return answer

    def add(self, job: Job) -> None:
        """Add a scan, which is being prepared beside the device's thread."""
        with self._changed:
            self._scheduler.hold(job, job.deadline)
            self._unprepared.add(job)

    def offer(self, job: Job, lane: Hashable, tiles: int) -> None:
        """Add the tiles of a scan that was prepared, or further ones; not if it was given up."""
        with self._changed:
            self._unprepared.discard(job)
            if job.wanted:
                self._scheduler.offer(job, lane, tiles)
                self._changed.notify()

    def remove(self, job: Job) -> int:
        """Forget a job, and return how many of its tiles will not be run."""
        with self._changed:
            self._unprepared.discard(job)
            saved = self._scheduler.remove(job)
            self._changed.notify()
            return saved

    def set_deadline(self, job: Job) -> None:
        """Note that another of a job's waiters is the next to give up."""
        with self._changed:
            self._scheduler.set_deadline(job, job.deadline)
            self._changed.notify()

    def late(self, now: float) -> tuple[Job, ...]:
        """List the jobs whose deadline has passed."""
        with self._changed:
            return self._scheduler.late(now)

    @property
    def depth(self) -> int:
        """Count the scans to be prepared and the tiles that no batch holds yet."""
        with self._changed:
            return len(self._unprepared) + self._scheduler.waiting_tiles

    @property
    def unprepared(self) -> int:
        """Count the scans that have no tiles yet."""
        with self._changed:
            return len(self._unprepared)

    @property
    def backlog_s(self) -> float:
        """Estimate how long the device will be busy with the tiles that wait."""
        with self._changed:
            return self._scheduler.backlog

    def foresee_s(self, lane: Hashable, tiles: int) -> float:
        """Estimate how long a new scan of so many tiles would take."""
        with self._changed:
            return self._scheduler.foresee(lane, tiles)

    def take(self, patience_s: float | None = None, *, calls_only: bool = False) -> Work:
        """Wait until there is something to do, and take it.

        Args:
            patience_s: Seconds to wait at most; None: for ever.
            calls_only: Whether tiles must wait, because the device is in trouble.

        Returns:
            A call; else a batch of tiles; Rest after ``patience_s``; None once the list is closed.
        """
        end_s = None if patience_s is None else time.monotonic() + patience_s
        with self._changed:
            while not self._closed:
                work = self._next(calls_only)
                if work is not None:
                    return work
                # Whatever wakes the thread meanwhile, it waits no longer than it was asked to.
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return Rest()
                self._changed.wait(left_s)
            return None

    def close(self) -> None:
        """Let the thread end; whatever waits is not done any more."""
        with self._changed:
            self._closed = True
            calls, self._calls = self._calls, deque()
            self._changed.notify()
        for call in calls:
            call.refuse(NotReady(ENDED))

    def _next(self, calls_only: bool) -> Call | Batch[Job] | None:
        if self._calls:
            return self._calls.popleft()
        return None if calls_only else self._scheduler.next_batch(time.monotonic())
