"""setting -> device: the one that was asked for, or an error; never another in silence.

And what there is to say about its memory, which no two kinds of device say alike.
"""

import gc
import math
import os
import re
from typing import Final

import torch

from app.errors import StartupError

SHORTAGE: Final = re.compile(
    r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE
)
"""How torch says on CUDA, and on CPUs of either kind of system, that memory ran out."""

NEED: Final = re.compile(r"tried to allocate ([\d.]+ ?(?:bytes|[KMGT]iB)|\d+)", re.IGNORECASE)

MEMORY_SHARE: Final = 0.8
"""Of a device's memory that a batch may take, grids and weights included."""


def choose_device(wanted: str) -> torch.device:
    """Find the device that a setting names.

    Args:
        wanted: ``auto`` (CUDA when there is one, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.

    Returns:
        The device, known to be there.

    Raises:
        StartupError: The setting names no device, or one that this machine lacks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return torch.device("cuda:0" if count else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"expected a device of auto, cpu, cuda or cuda:N, got {wanted!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise StartupError(f"expected a CUDA device {wanted}, got a machine with {count} of them")
    return device


def is_shortage(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out; on CPUs torch raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and SHORTAGE.search(str(error)) is not None


def describe_shortage(error: BaseException, device: torch.device) -> str:
    """Say what was needed at last, as far as the error tells, and what the device has."""
    found = NEED.search(str(error))
    need = "more" if found is None else f"{found[1]} more"
    return f"needed {need}, and {device} has {memory_of(device) / (1 << 30):.1f} GiB in all"


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory that a device has, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_room(device: torch.device) -> float:
    """Say how many times the memory at its fullest since the last call would have fitted.

    Infinity on a CPU, whose memory torch does not count.
    """
    if device.type != "cuda":
        return math.inf
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return MEMORY_SHARE * memory_of(device) / max(peak, 1)


def free_memory() -> None:
    """Give back what failed work has left, on every device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
