"""The devices that a setting names, or an error, never another one in silence; and their memory."""

import gc
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from app.errors import StartupError

Voxels = Float[Tensor, "i j k"]
"""Voxel values of one scan on a device."""

Result = TypeVar("Result")

OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|can't allocate memory|not enough memory|_ALLOC(ATION)?_FAILED", re.IGNORECASE
)
"""What torch's errors say on CUDA, where cuBLAS and cuDNN have codes of their own, and on the CPU
of each operating system."""

ALLOCATION: Final = re.compile(r"tried to allocate ([\d.]+ ?(?:bytes|[KMGT]iB)|\d+)", re.IGNORECASE)

OWN_GROUPS: Final = "/proc/self/cgroup"
"""Where Linux names the control groups of this process."""

CGROUPS: Final = "/sys/fs/cgroup"
"""Where Linux says what they may use: the one hierarchy of version 2, or those of version 1."""

MEMORY_SHARE: Final = 0.8
"""Share of a device's memory that a batch may take, grids and weights included."""


CPU_PASSES: Final = 4
"""Forward passes side by side on a CPU of as many cores or more. A pass uses many cores less well
than few, but each takes memory, and is slower beside others."""


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A device under a name of its own: to torch all CPU devices are the same.

    Attributes:
        name: As in the setting, such as ``cuda:1`` or ``cpu:0``.
        device: The torch device.
        asynchronous: Whether calls return before the work is done, so that batch n + 1 can be
            enqueued before batch n is synchronised.
        passes: How many forward passes run at most side by side, of different scans.
    """

    name: str
    device: torch.device
    asynchronous: bool = False
    passes: int = 1


HOST: Final = NamedDevice("cpu", torch.device("cpu"))


@runtime_checkable
class OnDevice(Protocol):
    """Calls a function on the thread that owns a device, and returns its result."""

    def __call__(self, function: Callable[[], Result], /) -> Result:
        """Call it."""


def call_here(function: Callable[[], Result], /) -> Result:
    """Call a function in the calling thread, where that owns the device."""
    return function()


def choose_device(setting: str) -> torch.device:
    """Find the first device that a setting names, for whatever runs on one; see ``choose_devices``.

    Raises:
        StartupError: As ``choose_devices``.
    """
    return choose_devices(setting)[0].device


def choose_devices(setting: str) -> tuple[NamedDevice, ...]:
    """Find the devices that a setting names, each of which is to have a thread of its own.

    Args:
        setting: ``auto`` (CUDA when there is one, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``,
            or several such names with commas between them, or ``all``: every CUDA device.
            ``cpu:0,cpu:1`` runs two networks on the CPU at once.

    Returns:
        The devices, known to be there, in the order of the setting.

    Raises:
        StartupError: The setting names no device, one twice, or one that this machine lacks.
    """
    if setting == "all":
        count = _cuda_count()
        if not count:
            raise StartupError("expected a machine with CUDA devices for all, got one with none")
        return tuple(_find_device(f"cuda:{index}") for index in range(count))
    found = tuple(_find_device(name.strip()) for name in setting.split(","))
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise StartupError(f"expected every device once, got {', '.join(names)}")
    return found


def _find_device(name: str) -> NamedDevice:
    count = _cuda_count()
    if name == "auto":
        name = "cuda:0" if count else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    # Indices are bytes to torch: cuda:256 is cuda:0 to it.
    if device.type not in ("cpu", "cuda") or str(device) != name:
        raise StartupError(f"expected a device of auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cpu":
        return NamedDevice(name, HOST.device, passes=CPU_PASSES)
    index = device.index or 0
    if index >= count:
        raise StartupError(f"expected a CUDA device {name}, got a machine with {count} of them")
    return NamedDevice(f"cuda:{index}", torch.device("cuda", index), asynchronous=True)


def _cuda_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def fast_precisions(device: torch.device) -> tuple[str, ...]:
    """List the precisions below float32 that a device has instructions for."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        # Tensor cores came with Volta in float16, with Ampere in bfloat16.
        names = {"bfloat16": capability >= (8, 0), "float16": capability >= (7, 0)}
    else:
        flags: Mapping[str, Any] = torch.cpu.get_capabilities()
        bfloat16 = flags.get("amx_bf16", False) or flags.get("avx512_bf16", False)
        names = {"bfloat16": bfloat16, "float16": flags.get("amx_fp16", False)}
    return tuple(name for name, fast in names.items() if fast)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out; not all that torch raises has a class."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def is_device_failure(error: BaseException) -> bool:
    """Say whether an error is the device's own, as of CUDA: after most, no call to it works."""
    return any(isinstance(one, torch.AcceleratorError) for one in (error, error.__cause__))


def describe_out_of_memory(error: BaseException, device: torch.device) -> str:
    """Say how much memory the last allocation needed, if the error does, and the device has."""
    found = ALLOCATION.search(str(error))
    need = "more" if found is None else f"{found[1]} more"
    return f"needed {need}, and {device} has {total_memory(device) / (1 << 30):.1f} GiB in all"


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that a device has, used or not.

    Limits count of a container, of a unit of systemd or of a job of Slurm.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = "memory.max", "memory.limit_in_bytes"  # Of version 2, and of version 1.
    limits = (_read(f"{group}/{name}") for group in _own_groups("memory") for name in names)
    return min([machine, *(int(text) for text in limits if text.isdigit())])


def core_limit() -> float:
    """Return of how many cores this process may use the time, at least 1; infinity: of all.

    Limits count as in ``total_memory``: of ``docker run --cpus``, of ``CPUQuota=`` of systemd.
    """
    limit = math.inf
    for group in _own_groups("cpu"):
        # Microseconds in each period of so many; no number: no limit.
        version1 = (_read(f"{group}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota, _, period = (_read(f"{group}/cpu.max") or " ".join(version1)).partition(" ")
        if quota.isdigit():
            limit = min(limit, max(1.0, int(quota) / int(period)))
    return limit


def _own_groups(controller: str) -> Iterator[str]:
    """Name the folders of this process's control groups, and of those around them."""
    for line in _read(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 names no controllers.
        if controller in controllers.split(",") or not controllers:
            hierarchy = f"{CGROUPS}/{controller}" if controllers else CGROUPS
            # In a container a path may be that of the machine: the last, ``/``, is always there.
            group = PurePosixPath(path)
            yield from (f"{hierarchy}{each}" for each in (group, *group.parents))


def _read(path: str) -> str:
    try:
        # Names of control groups are any bytes.
        return os.fsdecode(Path(path).read_bytes()).strip()
    except OSError:
        return ""


def memory_headroom(device: torch.device) -> float:
    """Divide the memory that may be used by the peak since the last call.

    Infinity on the CPU, whose memory torch does not count.
    """
    if device.type != "cuda":
        return math.inf
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return MEMORY_SHARE * total_memory(device) / max(peak, 1)


def release_memory() -> None:
    """Release what failed work has left behind, and torch's caches on every CUDA device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
