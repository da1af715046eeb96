"""What is to be known of devices, threads and compilers, so that the stages of the data need not.

device    which devices there are, their memory, and the errors that say it ran out
heap_trim few heaps, and free memory returned to the OS
transfer  host arrays to device tensors; CUDA streams and events
threads   threads per operation, and loops in parallel
jit       Numba for the CPU; whether there is Triton for CUDA
floats    numbers of any float type in compiled loops
"""

from app.compute.device import (
    HOST,
    MEMORY_SHARE,
    NamedDevice,
    OnDevice,
    Voxels,
    call_here,
    choose_device,
    choose_devices,
    describe_out_of_memory,
    fast_precisions,
    is_device_failure,
    is_out_of_memory,
    memory_headroom,
    release_memory,
    total_memory,
)
from app.compute.floats import BFLOAT16, as_numbers, value
from app.compute.heap_trim import HeapTrimmer, limit_heaps
from app.compute.jit import has_compiled_loops, has_triton, numba_jit
from app.compute.threads import (
    SharedCores,
    adopt_thread_limit,
    limit_threads,
    run_split,
    start_executor,
    start_thread,
)
from app.compute.transfer import (
    READY,
    CopyStreams,
    HostCopy,
    ReadyEvent,
    Stopwatch,
    record_event,
    set_device,
    upload,
    upload_numbers,
)

__all__ = [
    "BFLOAT16", "HOST", "MEMORY_SHARE", "READY", "CopyStreams", "HeapTrimmer", "HostCopy",
    "NamedDevice", "OnDevice", "ReadyEvent", "SharedCores", "Stopwatch", "Voxels",
    "adopt_thread_limit", "as_numbers", "call_here", "choose_device", "choose_devices",
    "describe_out_of_memory", "fast_precisions", "has_compiled_loops", "has_triton",
    "is_device_failure", "is_out_of_memory", "limit_heaps", "limit_threads", "memory_headroom",
    "numba_jit", "record_event", "release_memory", "run_split", "set_device", "start_executor",
    "start_thread", "total_memory", "upload", "upload_numbers", "value",
]  # fmt: skip
