"""arrays of the host -> tensors on a device, and clocks that keep its pace.

On CUDA a scan travels in the type in which it is stored, through pinned memory, on a stream of its
own; what is computed of it there runs beside the forward passes of others. The stream that reads it
waits by an event, so no thread stands still for it. On the host there are no streams, and all of
this is what it would be without this module.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from app.compute.device import Voxels

PIECE_BYTES: Final = 1 << 24
"""Of pinned memory that is filled while the piece before travels: bounded, however large a scan."""


def upload(array: np.ndarray, device: torch.device, order: Literal["K", "C"]) -> Voxels:
    """Bring voxels to a device as float32, in memory of their own.

    Args:
        array: Voxel values, (i j k), of a type that torch takes; any strides.
        device: Where to.
        order: ``C``: i slowest; ``K``: in the order in which they lie, none of them backwards.

    Returns:
        The same values, the same axes. On CUDA the host does not wait until they are there, but
        whatever is done with them on the current stream does.
    """
    if device.type == "cpu":
        return torch.from_numpy(array.astype(np.float32, order=order))
    return bring(array, device, order)


def bring(array: np.ndarray, device: torch.device, order: Literal["K", "C"]) -> Voxels:
    """Do as ``upload`` by way of pinned memory, whichever device it is."""
    # Turned around there, since many a scan lies backwards, and the host is the slower one.
    backwards = tuple(axis for axis, stride in enumerate(array.strides) if stride < 0)
    values = send(np.flip(array, backwards), device).to(torch.float32)
    if backwards:
        values = values.flip(backwards)
    return values.contiguous() if order == "C" else values


def send(array: np.ndarray, device: torch.device) -> Shaped[Tensor, "i j k"]:
    """Copy an array to a device in its own type, piece by piece through pinned memory.

    Args:
        array: Of a type that torch takes; any strides.
        device: Where to.

    Returns:
        The same values, the same axes, in the same order in memory.
    """
    order = sorted(range(array.ndim), key=lambda axis: array.strides[axis], reverse=True)
    dense = array.transpose(order)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    there = torch.empty(dense.shape, dtype=dtype, device=device)
    rows = max(1, PIECE_BYTES * len(dense) // max(1, dense.nbytes))
    for first in range(0, len(dense), rows):
        piece = dense[first : first + rows]
        # Torch keeps the piece's memory from being used again before it has been read.
        staged = torch.empty(piece.shape, dtype=dtype, pin_memory=device.type == "cuda")
        np.copyto(staged.numpy(), piece)
        there[first : first + rows].copy_(staged, non_blocking=True)
    return there.permute([order.index(axis) for axis in range(array.ndim)])


@dataclass(frozen=True, slots=True)
class Arrival:
    """The moment at which what was given to a stream is done.

    Attributes:
        event: None where there is no stream: it is done already.
    """

    event: torch.cuda.Event | None = None

    def precede(self, values: Tensor) -> None:
        """Have the current stream wait for this moment, and nobody else, before it reads values.

        Args:
            values: Made by the stream that this is of; their memory is kept until both are done.
        """
        if self.event is not None:
            reading = torch.cuda.current_stream(values.device)
            reading.wait_event(self.event)
            values.record_stream(reading)


NOW: Final = Arrival()


def mark(device: torch.device) -> Arrival:
    """Mark the moment at which all that the current stream has been given is done."""
    if device.type == "cpu":
        return NOW
    return Arrival(torch.cuda.current_stream(device).record_event())


class Fetching:
    """A few numbers on their way to the host, which goes on meanwhile."""

    def __init__(self, numbers: Shaped[Tensor, " n"]) -> None:
        """Args: the numbers, which the current stream makes."""
        self._event: torch.cuda.Event | None = None
        self._here = numbers
        if numbers.device.type == "cuda":
            self._here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def wait(self) -> list[int]:
        """Wait until they are here, and for nothing that the stream was given later."""
        if self._event is not None:
            self._event.synchronize()
        return [int(number) for number in self._here.tolist()]


class CopyStream:
    """A device's stream for what is prepared beside its forward passes."""

    def __init__(self, device: torch.device) -> None:
        """Args: the device, which is not touched before the first block."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Give this stream whatever the current thread does on the device, until the block ends."""
        if self._device.type == "cpu":
            yield
            return
        # Threads that come first at the same time may each make one, which is as good.
        self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


class Stopwatch:
    """Takes the time of what a device does, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        """Start it on the current stream."""
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._note()

    def stop(self) -> None:
        """Stop it on the same stream."""
        self._note()

    def seconds(self) -> float:
        """Say what it shows; the device has done that since, or is waited for."""
        if not self._events:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3

    def _note(self) -> None:
        if self._device.type == "cpu":
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)


def own_device(device: torch.device) -> None:
    """Make a CUDA device the one that the current thread means where it names none."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
