"""A batch of tiles of many cases -> their votes; what fails is run again smaller.

A batch that raises is run again tile by tile, so only the guilty case fails. One that does not fit
the device's memory is halved until it does; a case whose single tile does not fit fails.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from app.compute import describe_out_of_memory, is_out_of_memory, release_memory
from app.errors import DoesNotFit
from app.inference.forward import Pass, launch, settle
from app.inference.scan_state import Case

Tiles: TypeAlias = Sequence[tuple[Case, int]]
Wanted: TypeAlias = Callable[[Case], bool]


@dataclass(slots=True)
class BatchReport:
    """What became of a batch.

    Attributes:
        tiles: How many the device was given.
        seconds: That it took for all of them at once; None if it failed.
        busy_s: That it was busy with them in all.
        errors: Of the cases that failed.
        fits: Most tiles that may be tried again, if some number did not fit.
        shortages: How often memory ran out.
    """

    tiles: int
    seconds: float | None = None
    busy_s: float = 0.0
    errors: dict[Case, Exception] = field(default_factory=dict)
    fits: int | None = None
    shortages: int = 0


@dataclass(slots=True)
class Flight:
    """A batch between the moment at which a device was given it, and that at which it is done.

    Attributes:
        tiles: Case and tile index; all of one lane.
        wanted: Whether anybody still waits for a case.
        outcome: What the device was given; the error if it took nothing; None: no tile is wanted,
            or it has ended.
        start_s: When, by ``time.perf_counter()``.
    """

    tiles: Tiles
    wanted: Wanted
    outcome: Pass | Exception | None
    start_s: float

    @property
    def fell_short(self) -> bool:
        """Whether the device had no memory for it."""
        return isinstance(self.outcome, DoesNotFit)


def start(tiles: Tiles, wanted: Wanted) -> Flight:
    """Give a device a batch.

    Args:
        tiles: Case and tile index; all of one lane.
        wanted: Whether anybody still waits for a case.

    Returns:
        What to end.
    """
    start_s = time.perf_counter()
    left = [slot for slot in tiles if wanted(slot[0])]
    outcome: Pass | Exception | None = None
    if left:
        try:
            outcome = launch(left)
        except Exception as error:  # noqa: BLE001 - handed to everybody who waits for the case
            outcome = named(error, _device_of(left))
    return Flight(left, wanted, outcome, start_s)


def end(flight: Flight) -> BatchReport:
    """Wait for a batch; whatever fails, the cases that are sound get their votes.

    Returns:
        What became of it.
    """
    report = BatchReport(len(flight.tiles))
    _end(flight, report)
    return report


def _end(flight: Flight, report: BatchReport) -> None:
    error, tiles = _settle(flight, report), flight.tiles
    if error is None:
        return
    if isinstance(error, DoesNotFit):
        release_memory()
        report.shortages += 1
    if len(tiles) == 1:
        report.errors[tiles[0][0]] = error
        return
    size = 1
    if isinstance(error, DoesNotFit):
        size = len(tiles) // 2
        report.fits = min(size, report.fits or size)
    for first in range(0, len(tiles), size):
        left = [slot for slot in tiles[first : first + size] if slot[0] not in report.errors]
        _end(start(left, flight.wanted), report)


def _settle(flight: Flight, report: BatchReport) -> Exception | None:
    """Wait for a pass and keep its votes, or return what it raised."""
    # Its tensors are let go of here, as what is run again needs their memory.
    outcome, flight.outcome = flight.outcome, None
    if not isinstance(outcome, Pass):
        report.busy_s += time.perf_counter() - flight.start_s
        return outcome
    try:
        seconds = settle(outcome)
    except Exception as error:  # noqa: BLE001 - handed to everybody who waits for the case
        report.busy_s += time.perf_counter() - flight.start_s
        return named(error, _device_of(flight.tiles))
    report.busy_s += seconds
    if len(flight.tiles) == report.tiles:
        report.seconds = seconds
    return None


def named(error: Exception, device: torch.device) -> Exception:
    """Call a shortage of memory by its name, wherever it happened.

    Args:
        error: What was raised.
        device: Where.

    Returns:
        The error; DoesNotFit without its traceback if memory ran out, since the frames of the
        failed pass hold its tensors, whose memory is needed.
    """
    if isinstance(error, DoesNotFit):
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return error
    if is_out_of_memory(error):
        shortage = describe_out_of_memory(error, device)
        return DoesNotFit(f"expected work that fits the device: {shortage}")
    return error


def _device_of(tiles: Tiles) -> torch.device:
    return tiles[0][0].model.network.device
