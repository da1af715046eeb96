"""Those who ask for one scan -> a Job: what is computed once and answered to all of them.

Its waiters belong to the event loop, everything else to the device's thread.
"""

import asyncio
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

from app.inference import Detection, Detector, ScanState
from app.io import Volume
from app.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a scan is.

    Attributes:
        stage: ``queued``: no tile has run; ``tile``: some have.
        ahead: Other scans that were in work when this one was queued.
        tile: Tiles that have run.
        tiles: Tiles there are, as far as is known; 0 before the scan is prepared.
    """

    stage: Literal["queued", "tile"]
    ahead: int = 0
    tile: int = 0
    tiles: int = 0


@dataclass(eq=False, slots=True)
class Waiter:
    """One who waits for a job's answer.

    Attributes:
        answer: Where it comes.
        deadline: Of the loop's clock, after which it is of no use.
        on_prepared: Is called once the scan is on the device, or will never be.
        watch: Is told of progress.
    """

    answer: asyncio.Future[Detection]
    deadline: float
    on_prepared: Callable[[], None]
    watch: Callable[[Progress], None] | None = None

    def tell(self, progress: Progress) -> None:
        """Tell of progress, if it is wanted."""
        if self.watch is not None:
            self.watch(progress)


def question(model: LoadedModel, volume: Volume, frame: int) -> Hashable:
    """Say what is asked: who asks for the same on any device waits for the same job."""
    return model.digest, volume.digest, frame


@dataclass(eq=False, slots=True)
class Job:
    """One scan between its decoding and its answer.

    Attributes:
        key: Content, frame and model: who asks for the same waits for the same job.
        detector: The model that is asked.
        volume: The scan; None once it is on the device.
        waiters: Who waits; nobody: the job is given up.
        asked_s: When it was asked, by ``time.perf_counter()``.
        since_s: When it began to wait for the device, by the same clock.
        queue_s: How long it has waited for the device.
        case: The scan on the device.
        run: Tiles that have run.
        tiles: Tiles there are, further ones of a second look included.
        failed: Whether one of them has; others may be on the device still.
    """

    key: Hashable
    detector: Detector
    volume: Volume | None
    asked_s: float
    since_s: float
    waiters: list[Waiter] = field(default_factory=list)
    queue_s: float = 0.0
    case: ScanState | None = None
    run: int = 0
    tiles: int = 0
    failed: bool = False

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits."""
        return bool(self.waiters)

    @property
    def deadline(self) -> float:
        """When the first of those who wait gives up; infinity if nobody waits."""
        return min((waiter.deadline for waiter in self.waiters), default=math.inf)

    def prepared(self) -> None:
        """Tell everybody that the scan need not be kept for its job any more."""
        for waiter in self.waiters:
            waiter.on_prepared()

    def tell(self, progress: Progress) -> None:
        """Tell everybody who wants to know how far the job is."""
        for waiter in self.waiters:
            waiter.tell(progress)

    def answer(self, detection: Detection) -> None:
        """Answer everybody."""
        for waiter in self._dismiss():
            waiter.answer.set_result(detection)

    def fail(self, error: Exception) -> None:
        """Hand an error to everybody."""
        for waiter in self._dismiss():
            waiter.answer.set_exception(error)

    def expire(self, now: float, error: Exception) -> None:
        """Hand an error to those whose deadline has passed; the others wait on."""
        for waiter in [waiter for waiter in self.waiters if now >= waiter.deadline]:
            self.waiters.remove(waiter)
            waiter.on_prepared()
            if not waiter.answer.done():
                waiter.answer.set_exception(error)

    def _dismiss(self) -> list[Waiter]:
        dismissed, self.waiters = self.waiters, []
        for waiter in dismissed:
            waiter.on_prepared()
        return [waiter for waiter in dismissed if not waiter.answer.done()]
