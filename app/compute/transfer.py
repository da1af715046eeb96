"""Host arrays to device tensors, and the CUDA events and streams that order the work.

On CUDA a scan is copied in its stored type, through pinned memory, on a stream of its thread, and
preprocessed there while the forward passes of other scans run. The stream that reads it waits for
an event, so no thread blocks. On the CPU there are no streams, and none of this is needed.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from app.compute.device import Voxels

CHUNK_BYTES: Final = 1 << 24
"""Pinned memory filled while the chunk before is copied: bounded, however large a scan is."""


def upload(array: np.ndarray, device: torch.device, order: Literal["K", "C"]) -> Voxels:
    """Copy voxels to a device as float32, into memory of their own.

    Args:
        array: Voxel values, (i j k), of a type that torch takes; any strides.
        device: The target.
        order: ``C``: i slowest; ``K``: the order of the array in memory, without negative strides.

    Returns:
        The same values, the same axes. On CUDA the host does not wait for the copy; whatever is
        done with them on the current stream does.
    """
    if device.type == "cpu":
        return torch.from_numpy(array.astype(np.float32, order=order))
    return upload_pinned(array, device, order)


def upload_pinned(array: np.ndarray, device: torch.device, order: Literal["K", "C"]) -> Voxels:
    """Do as ``upload``, through pinned memory on any device."""
    # Flipped on the device, since many scans are stored backwards, and the host is slower at it.
    backwards = tuple(axis for axis, stride in enumerate(array.strides) if stride < 0)
    values = copy_pinned(np.flip(array, backwards), device).to(torch.float32)
    if backwards:
        values = values.flip(backwards)
    return values.contiguous() if order == "C" else values


def upload_numbers(numbers: np.ndarray, device: torch.device) -> Shaped[Tensor, "*n"]:
    """Copy a few numbers to a device in their own type; on CUDA the host does not wait."""
    return torch.from_numpy(numbers) if device.type == "cpu" else copy_pinned(numbers, device)


def copy_pinned(array: np.ndarray, device: torch.device) -> Shaped[Tensor, "*n"]:
    """Copy an array of any strides to a device, chunk by chunk through pinned memory.

    Returns:
        The same values in the same type, the same axes, in the same order in memory.
    """
    order = sorted(range(array.ndim), key=lambda axis: array.strides[axis], reverse=True)
    dense = array.transpose(order)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    copied = torch.empty(dense.shape, dtype=dtype, device=device)
    rows = max(1, CHUNK_BYTES * len(dense) // max(1, dense.nbytes))
    for first in range(0, len(dense), rows):
        chunk = dense[first : first + rows]
        # Torch reuses pinned memory only after the copy that reads it is done.
        staged = torch.empty(chunk.shape, dtype=dtype, pin_memory=device.type == "cuda")
        np.copyto(staged.numpy(), chunk)
        copied[first : first + rows].copy_(staged, non_blocking=True)
    return copied.permute([order.index(axis) for axis in range(array.ndim)])


@dataclass(frozen=True, slots=True)
class ReadyEvent:
    """When the work queued on a stream so far is done.

    Attributes:
        event: None on the CPU, where it is done already.
    """

    event: torch.cuda.Event | None = None

    def wait(self, values: Tensor) -> None:
        """Make the current stream, but no thread, wait for the event before it reads values.

        Args:
            values: Made by the stream of the event; their memory is kept until both are done.
        """
        if self.event is not None:
            stream = torch.cuda.current_stream(values.device)
            stream.wait_event(self.event)
            values.record_stream(stream)


READY: Final = ReadyEvent()


def record_event(device: torch.device) -> ReadyEvent:
    """Record an event behind all that is queued on a device's current stream."""
    if device.type == "cpu":
        return READY
    return ReadyEvent(torch.cuda.current_stream(device).record_event())


class HostCopy:
    """An asynchronous copy of a few numbers to the host."""

    def __init__(self, numbers: Shaped[Tensor, " n"]) -> None:
        """Start the copy of numbers that were made on the current stream."""
        self._event: torch.cuda.Event | None = None
        self._copy = numbers
        if numbers.device.type == "cuda":
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._copy.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def wait(self) -> list[int]:
        """Wait for the numbers, but not for what the stream was given after them."""
        if self._event is not None:
            self._event.synchronize()
        return [int(number) for number in self._copy.tolist()]


class CopyStreams(threading.local):
    """Streams for uploads and preprocessing, which run while a device's forward passes do.

    Each thread has its own: whoever waits for numbers of one scan waits for no other's.

    Args:
        device: The device; it is not touched before a stream is first used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make the thread's stream its current one until the block ends."""
        if self._device.type == "cpu":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


class Stopwatch:
    """Measures the time that a device takes for stages of work, without synchronising with it.

    The first stage begins when it is made, on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._paused_s = 0.0
        self.end_stage()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of something else on the same thread; a CPU's only."""
        start_s = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - start_s

    def end_stage(self) -> None:
        """End a stage and begin the next, on the same stream."""
        if self._device.type == "cpu":
            self._times.append(time.perf_counter() - self._paused_s)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Return the time of each stage that has ended, after waiting for the device."""
        if not self._events:
            return [end - start for start, end in pairwise(self._times)]
        self._events[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._events)]


def set_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
