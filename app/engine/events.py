"""What a device's thread tells the event loop of the work."""

from dataclasses import dataclass
from typing import TypeAlias

from app.engine.jobs import Job
from app.inference import Detection


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job's scan is on the device."""

    job: Job


@dataclass(frozen=True, slots=True)
class Progressed:
    """Some of a job's tiles have run."""

    job: Job


@dataclass(frozen=True, slots=True)
class Settled:
    """A job is done, or has failed."""

    job: Job
    result: Detection | Exception


@dataclass(frozen=True, slots=True)
class Troubled:
    """The device is in trouble for a reason, or no more; while it recovers, waiting is worth it."""

    reason: str | None
    recovering: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The thread has ended, and not because it was told to."""

    error: BaseException


Event: TypeAlias = Prepared | Progressed | Settled | Troubled | Lost
"""What becomes of the work."""
