"""function -> compiled function: how the loops over voxels and votes are made fast.

Compiled code is kept beside the sources or, if that is set, in ``NUMBA_CACHE_DIR``, so that only
the first start on a machine takes the seconds to compile. Where nothing can be written, every
start does.
"""

from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for the types it will be called with; it runs without Python's lock."""
    loop: Callable[..., Any] = njit(nogil=True, error_model="numpy")(function)
    # Numba raises this where it finds no folder to write to.
    with suppress(RuntimeError):
        loop.enable_caching()  # type: ignore[attr-defined]
    return loop


def kernels_serve(device: torch.device) -> bool:
    """Say whether kernels written in Triton, which not every platform has, run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None
