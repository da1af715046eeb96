"""Single flight: one ActiveScan per distinct (model, scan, frame), many waiters.

The waiters of a scan belong to the event loop. Everything else of it is changed by one thread at a
time: one that prepares, runs or finishes it, else the device's thread.
"""

import asyncio
import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVarTuple, runtime_checkable

from app.engine.scheduler import BACKGROUND
from app.inference import Detection, Located, ScanState
from app.io import Volume
from app.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a scan is.

    Attributes:
        stage: ``queued``: no tile has run; ``tile``: some have.
        ahead: Other scans that are in work, as long as none of its tiles has run.
        tile: Tiles that have run.
        tiles: Tiles there are, as far as is known; 0 before the scan is prepared.
    """

    stage: Literal["queued", "tile"]
    ahead: int = 0
    tile: int = 0
    tiles: int = 0


def ignore(*_: object) -> None:
    """Do nothing, as a callback that is not needed."""


@dataclass(frozen=True, slots=True)
class DetectRequest:
    """A decoded scan whose landmarks one client waits for.

    Attributes:
        model: The model to use, with its copies on all devices.
        volume: The scan.
        deadline: On the event loop's clock, after which the answer is of no use.
        frame: Frame of the file; all frames of a file share a digest.
        on_progress: Called with the progress of the scan.
        client: Who waits; clients share the device evenly.
        keeps_votes: Whether the votes are wanted, too.
    """

    model: LoadedModel
    volume: Volume
    deadline: float
    frame: int = 0
    on_progress: Callable[[Progress], None] = ignore
    client: str = ""
    keeps_votes: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for requests that one computation answers, on whatever device."""
        background = self.client == BACKGROUND  # Who waits does not join what is in no hurry.
        return self.model.digest, self.volume.digest, self.frame, self.keeps_votes, background


@dataclass(eq=False, frozen=True, slots=True)
class Waiter:
    """A client that waits for a scan, and the future that receives the answer."""

    request: DetectRequest
    future: asyncio.Future[Detection]


@dataclass(eq=False, slots=True)
class ActiveScan:
    """One scan between its decoding and its answer.

    Attributes:
        request: The first that it answers; the others have the same key.
        passes: Those over its scan, each prepared when it is asked for, and what they have found.
        waiters: The clients that wait; none: the scan is abandoned.
        created_s: When it was created, by ``time.perf_counter()``.
        queued_s: Since when its tiles wait for the device, by the same clock; None: they do not.
        queue_s: How long it has waited for the device in all.
        state: The last pass that was prepared.
        tiles_run: Tiles that have run.
        tiles: Tiles there are, those of all passes so far.
        failed: Whether a tile has failed; others of its tiles may still be on the device.
    """

    request: DetectRequest
    passes: Iterator[ScanState | Located]
    waiters: list[Waiter]
    created_s: float = field(default_factory=time.perf_counter)
    queued_s: float | None = None
    queue_s: float = 0.0
    state: ScanState | None = None
    tiles_run: int = 0
    tiles: int = 0
    failed: bool = False

    @property
    def has_waiters(self) -> bool:
        """Whether any client still waits."""
        return bool(self.waiters)

    @property
    def deadline(self) -> float:
        """The earliest deadline of the waiters; infinity without any."""
        return min((waiter.request.deadline for waiter in self.waiters), default=math.inf)

    def notify_progress(self, progress: Progress) -> None:
        """Call ``on_progress`` of all waiters."""
        for waiter in self.waiters:
            waiter.request.on_progress(progress)

    def resolve(self, detection: Detection) -> None:
        """Answer all waiters."""
        for waiter in self._dismiss_waiters():
            waiter.future.set_result(detection)

    def fail(self, error: Exception) -> None:
        """Raise an error in all waiters."""
        for waiter in self._dismiss_waiters():
            waiter.future.set_exception(error)

    def _dismiss_waiters(self) -> list[Waiter]:
        """Remove all waiters; gives those that can still be answered."""
        dismissed, self.waiters = self.waiters, []
        return [waiter for waiter in dismissed if not waiter.future.done()]


Told = TypeVarTuple("Told")


@runtime_checkable
class Listener(Protocol):
    """The event loop's side of a device, as its threads know it."""

    def tell(self, method: Callable[[*Told], None], /, *told: *Told) -> None:
        """Have one of the others called on the event loop; this one is called on any thread."""

    def show_progress(self, scan: ActiveScan, /) -> None:
        """A scan is on the device, and some of its tiles may have run."""

    def settle(self, scan: ActiveScan, outcome: Detection | Exception, /) -> None:
        """A scan is done, or has failed."""

    def set_health(self, unhealthy_reason: str | None, /, fail_scans: bool) -> None:
        """The device became unhealthy, or healthy again; scans fail if no recovery is in sight."""

    def restart_once(self) -> None:
        """The device's thread has ended, though nobody stopped it."""
