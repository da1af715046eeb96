"""A batch of tiles of many cases -> their votes; what fails is run again smaller.

A batch that raises is run again tile by tile, so only the guilty case fails. One that does not fit
the device's memory is halved until it does; a case whose single tile does not fit fails.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.case import Case
from app.detector import Detector
from app.device import describe_shortage, free_memory, is_shortage
from app.errors import DoesNotFit

Tiles = Sequence[tuple[Case, int]]


@dataclass(slots=True)
class BatchReport:
    """What became of a batch.

    Attributes:
        tiles: How many there were.
        seconds: Of the forward pass over all of them, votes included, whose number the host must
            know: so they are there when it is done. None if that failed.
        errors: Of the cases that failed.
        fits: Most tiles that may be tried again, if some number did not fit.
        shortages: How often memory ran out.
    """

    tiles: int
    seconds: float | None = None
    errors: dict[Case, Exception] = field(default_factory=dict)
    fits: int | None = None
    shortages: int = 0


def run_batch(detector: Detector, tiles: Tiles, wanted: Callable[[Case], bool]) -> BatchReport:
    """Run a batch; whatever fails, the cases that are sound get their votes.

    Args:
        detector: The model of all the cases.
        tiles: Case and tile index; all of one tile shape.
        wanted: Whether anybody still waits for a case.

    Returns:
        What became of it.
    """
    report = BatchReport(len(tiles))
    _attempt(detector, tiles, wanted, report)
    return report


def _attempt(
    detector: Detector, tiles: Tiles, wanted: Callable[[Case], bool], report: BatchReport
) -> None:
    left = [slot for slot in tiles if slot[0] not in report.errors and wanted(slot[0])]
    start = time.perf_counter()
    error = _failure(detector, left) if left else None
    if error is None:
        if len(left) == report.tiles:
            report.seconds = time.perf_counter() - start
        return
    if isinstance(error, DoesNotFit):
        free_memory()
        report.shortages += 1
    if len(left) == 1:
        report.errors[left[0][0]] = error
        return
    size = 1
    if isinstance(error, DoesNotFit):
        size = len(left) // 2
        report.fits = min(size, report.fits or size)
    for first in range(0, len(left), size):
        _attempt(detector, left[first : first + size], wanted, report)


def _failure(detector: Detector, tiles: Tiles) -> Exception | None:
    """Run tiles in one forward pass, and return what it raised."""
    try:
        detector.run(tiles)
    except Exception as error:  # noqa: BLE001 - handed to everybody who waits for the case
        return named(error, detector)
    return None


def named(error: Exception, detector: Detector) -> Exception:
    """Call a shortage of memory by its name, wherever it happened.

    Args:
        error: What a detector raised.
        detector: The one.

    Returns:
        The error; DoesNotFit without its traceback if memory ran out, since the frames of the
        failed pass hold its tensors, whose memory is needed.
    """
    if isinstance(error, DoesNotFit):
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return error
    if is_shortage(error):
        shortage = describe_shortage(error, detector.model.network.device)
        return DoesNotFit(f"expected work that fits the device: {shortage}")
    return error
