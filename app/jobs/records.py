"""What is kept of jobs, as values."""

from dataclasses import dataclass
from typing import Literal

from app.io import Selection

State = Literal["queued", "running", "done", "failed"]
Tiles = tuple[int, int]
"""Of a scan: how many have run, and how many there are, as far as is known."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be found in the scans of a job, and for whom.

    Attributes:
        owner: The client: the hash of a key, or an address.
        request_id: Of the request that ordered it.
        model: Name of the model, perhaps with a version.
        format: In which answers are written unless another is asked for.
        candidates: Whether answers list all modes of each landmark.
        selection: Which scan of each file.
    """

    owner: str
    request_id: str
    model: str
    format: str
    candidates: bool
    selection: Selection


@dataclass(frozen=True, slots=True)
class Claim:
    """A scan that is to be run now.

    Attributes:
        id: Of the scan, as long as its job is there; then perhaps of another's.
        job: Id of its job, which no other has.
        entry: Its number in the job's archive; None if the job's file is the scan.
        attempts: How often it has been run, this time included.
        order: What is to be found.
    """

    id: int
    job: str
    entry: int | None
    attempts: int
    order: Order


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A job, as far as it is.

    Attributes:
        created_s: When it was accepted, in seconds since 1970.
        finished_s: When its last scan was settled; None: it is not finished.
        counts: Number of its scans in each state.
        scans: JSON of its scans, as ``JobScanAnswer``; none in a list of jobs.
    """

    id: str
    model: str
    created_s: float
    finished_s: float | None
    counts: dict[State, int]
    scans: str = "[]"


@dataclass(frozen=True, slots=True)
class Usage:
    """What is kept.

    Attributes:
        queued: Scans that wait.
        bytes: Of all jobs, on disk or about to be.
        uploads: Files of jobs that have not arrived whole.
        upload_bytes: Of ``bytes``, theirs.
    """

    queued: int
    bytes: int
    uploads: int
    upload_bytes: int
