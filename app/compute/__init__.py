"""app/compute."""

from app.compute.device import (
    HOST,
    MEMORY_SHARE,
    NamedDevice,
    Voxels,
    choose_device,
    choose_devices,
    describe_shortage,
    fast_precisions,
    free_memory,
    is_shortage,
    memory_of,
    memory_room,
    wait_for,
)
from app.compute.jit import compiled, kernels_serve
from app.compute.threads import for_parts, share_out
from app.compute.transfer import (
    NOW,
    Arrival,
    CopyStream,
    Fetching,
    Stopwatch,
    mark,
    own_device,
    upload,
)

__all__ = [
    "HOST",
    "MEMORY_SHARE",
    "NOW",
    "Arrival",
    "CopyStream",
    "Fetching",
    "NamedDevice",
    "Stopwatch",
    "Voxels",
    "choose_device",
    "choose_devices",
    "compiled",
    "describe_shortage",
    "fast_precisions",
    "for_parts",
    "free_memory",
    "is_shortage",
    "kernels_serve",
    "mark",
    "memory_of",
    "memory_room",
    "own_device",
    "share_out",
    "upload",
    "wait_for",
]
