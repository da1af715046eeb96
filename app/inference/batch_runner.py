"""Runs a batch of tiles of several scans, and contains faults.

A batch that raises is run again tile by tile, so that only the scan at fault fails. A batch that
runs out of memory is halved until it fits; a scan of which a single tile does not fit fails.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch

from app.compute import describe_out_of_memory, is_out_of_memory, release_memory
from app.errors import InsufficientMemory
from app.inference.forward import ForwardPass, collect, launch
from app.inference.scan_state import ScanState

Tiles: TypeAlias = Sequence[tuple[ScanState, int]]
Result = TypeVar("Result")
IsActive: TypeAlias = Callable[[ScanState], bool]


@dataclass(slots=True)
class BatchReport:
    """The outcome of a batch.

    Attributes:
        tiles: How many were launched.
        seconds: Time of the batch; None if it failed as a whole.
        busy_s: Time the device was busy with its tiles, runs after a failure included.
        errors: Of the scans that failed.
        max_tiles: How many tiles to try at most from now on, if the batch ran out of memory.
        out_of_memory_count: How often memory ran out.
    """

    tiles: int
    seconds: float | None = None
    busy_s: float = 0.0
    errors: dict[ScanState, Exception] = field(default_factory=dict)
    max_tiles: int | None = None
    out_of_memory_count: int = 0


@dataclass(slots=True)
class InFlightBatch:
    """A batch that was launched and not yet collected.

    Attributes:
        tiles: Scan and tile index; all of one lane.
        is_active: Whether anybody still waits for a scan.
        outcome: The forward pass, or the error of launching it; None if there was no tile to
            launch, or once it is collected.
        start_s: When it was launched, by ``time.perf_counter()``.
    """

    tiles: Tiles
    is_active: IsActive
    outcome: ForwardPass | Exception | None
    start_s: float

    @property
    def out_of_memory(self) -> bool:
        """Whether the launch ran out of memory."""
        return isinstance(self.outcome, InsufficientMemory)


def launch_batch(
    tiles: Tiles, is_active: IsActive, give_way: Callable[[], None] | None = None
) -> InFlightBatch:
    """Launch a batch on its device; raises nothing.

    Args:
        tiles: Scan and tile index; all of one lane.
        is_active: Whether anybody still waits for a scan; tiles of others are left out.
        give_way: As for ``launch``.

    Returns:
        The batch to ``collect_batch``.
    """
    start_s = time.perf_counter()
    active = [slot for slot in tiles if is_active(slot[0])]
    # An error that had a name here would be held by this frame, which its traceback holds: with all
    # that the frames of the pass hold of the scans, it would wait for the garbage collector.
    return InFlightBatch(
        active,
        is_active,
        _attempt(lambda: launch(active, give_way), _device_of(active)) if active else None,
        start_s,
    )


def collect_batch(batch: InFlightBatch) -> BatchReport:
    """Wait for a batch; if it failed, run its tiles again in smaller batches.

    Returns:
        Its outcome; the states of the scans that did not fail have their votes.
    """
    report = BatchReport(len(batch.tiles))
    _collect(batch, report)
    return report


def _collect(batch: InFlightBatch, report: BatchReport) -> None:
    error, tiles = _collect_pass(batch, report), batch.tiles
    if error is None or not any(batch.is_active(state) for state, _ in tiles):
        return
    if isinstance(error, InsufficientMemory):
        release_memory()
        report.out_of_memory_count += 1
    if len(tiles) == 1:
        report.errors[tiles[0][0]] = error
        return
    size = 1
    if isinstance(error, InsufficientMemory):
        size = len(tiles) // 2
        report.max_tiles = min(size, report.max_tiles or size)
    for first in range(0, len(tiles), size):
        rest = [slot for slot in tiles[first : first + size] if slot[0] not in report.errors]
        _collect(launch_batch(rest, batch.is_active), report)


def _collect_pass(batch: InFlightBatch, report: BatchReport) -> Exception | None:
    """Wait for a forward pass and store its votes, or return what it raised."""
    # Drops the last reference to its tensors here: the runs that may follow need their memory.
    outcome, batch.outcome = batch.outcome, None
    if not isinstance(outcome, ForwardPass):
        report.busy_s += time.perf_counter() - batch.start_s
        return outcome
    seconds = _attempt(lambda: collect(outcome), _device_of(batch.tiles))
    if isinstance(seconds, Exception):
        report.busy_s += time.perf_counter() - batch.start_s
        return seconds
    report.busy_s += seconds
    if len(batch.tiles) == report.tiles:
        report.seconds = seconds
    return None


def _attempt(function: Callable[[], Result], device: torch.device) -> Result | Exception:
    """Call a function; gives what it returns or raises."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - reported to everybody who waits for the scan
        return translate_out_of_memory(error, device)


def translate_out_of_memory(error: Exception, device: torch.device) -> Exception:
    """Turn the errors by which torch and Python report exhausted memory into InsufficientMemory.

    Returns:
        InsufficientMemory without its traceback if memory ran out, since the frames of the failed
        pass hold tensors whose memory is needed; any other error as it is.
    """
    if isinstance(error, InsufficientMemory):
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return error
    if is_out_of_memory(error):
        shortage = describe_out_of_memory(error, device)
        return InsufficientMemory(f"expected work that fits the device: {shortage}")
    return error


def _device_of(tiles: Tiles) -> torch.device:
    return tiles[0][0].model.network.device
