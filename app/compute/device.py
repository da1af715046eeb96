"""setting -> devices: those that were asked for, or an error; never another in silence.

And what there is to say about its memory, which no two kinds of device say alike.
"""

import gc
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from app.errors import StartupError

Voxels = Float[Tensor, "i j k"]
"""Voxel values of one scan on a device."""

SHORTAGE: Final = re.compile(
    r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE
)
"""How torch says on CUDA, and on CPUs of either kind of system, that memory ran out."""

NEED: Final = re.compile(r"tried to allocate ([\d.]+ ?(?:bytes|[KMGT]iB)|\d+)", re.IGNORECASE)

MEMORY_SHARE: Final = 0.8
"""Of a device's memory that a batch may take, grids and weights included."""


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A device under a name of its own: to torch all CPU devices are the same.

    Attributes:
        name: As the setting has it, such as ``cuda:1`` or ``cpu:0``.
        device: What torch calls it.
        ahead: Whether it works while its thread goes on, so that it is given a batch before the one
            before is done.
    """

    name: str
    device: torch.device
    ahead: bool = False


HOST: Final = NamedDevice("cpu", torch.device("cpu"))


def choose_device(wanted: str) -> torch.device:
    """Find the one device that a setting names.

    Args:
        wanted: ``auto`` (CUDA when there is one, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.

    Returns:
        The device, known to be there.

    Raises:
        StartupError: The setting names no device, or one that this machine lacks.
    """
    return _find_device(wanted).device


def choose_devices(wanted: str) -> tuple[NamedDevice, ...]:
    """Find the devices that a setting names, each of which is to have a thread of its own.

    Args:
        wanted: As for ``choose_device``, or several such names with commas between them, or
            ``all``: every CUDA device. ``cpu:0,cpu:1`` runs two networks on the CPU at once.

    Returns:
        The devices, known to be there, in the order of the setting.

    Raises:
        StartupError: As ``choose_device``, or the setting names a device twice.
    """
    if wanted == "all":
        count = _cuda_count()
        if not count:
            raise StartupError("expected a machine with CUDA devices for all, got one with none")
        return tuple(_find_device(f"cuda:{index}") for index in range(count))
    found = tuple(_find_device(name.strip()) for name in wanted.split(","))
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise StartupError(f"expected every device once, got {', '.join(names)}")
    return found


def _find_device(wanted: str) -> NamedDevice:
    count = _cuda_count()
    if wanted == "auto":
        wanted = "cuda:0" if count else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"expected a device of auto, cpu, cuda or cuda:N, got {wanted!r}")
    if device.type == "cpu":
        return NamedDevice(wanted, HOST.device)
    index = device.index or 0
    if index >= count:
        raise StartupError(f"expected a CUDA device {wanted}, got a machine with {count} of them")
    return NamedDevice(f"cuda:{index}", torch.device("cuda", index), ahead=True)


def _cuda_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def fast_precisions(device: torch.device) -> tuple[str, ...]:
    """List the precisions below float32 that a device has instructions for."""
    if device.type == "cuda":
        generation = torch.cuda.get_device_capability(device)
        # Tensor cores came with Volta in float16, with Ampere in bfloat16.
        names = {"bfloat16": generation >= (8, 0), "float16": generation >= (7, 0)}
    else:
        # Before torch 2.10 or so there is nobody to ask.
        can: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        bfloat16 = can.get("amx_bf16", False) or can.get("avx512_bf16", False)
        names = {"bfloat16": bfloat16, "float16": can.get("amx_fp16", False)}
    return tuple(name for name, fast in names.items() if fast)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given, which a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
