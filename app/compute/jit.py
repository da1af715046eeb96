"""Compiling loops: Numba on the CPU, and whether Triton's kernels run on a device.

Numba caches compiled code beside the sources or, if that is set, in ``NUMBA_CACHE_DIR``, so that
only the first start on a machine takes the seconds to compile. Where nothing can be written, every
start does.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from numba import njit


def numba_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for the types of its arguments at the first call; it releases the GIL."""
    compiled: Callable[..., Any]
    try:
        compiled = njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # Numba finds no folder to cache in.
        compiled = njit(function, nogil=True, error_model="numpy")
    return compiled


def has_triton(device: torch.device) -> bool:
    """Say whether kernels written in Triton, which not every platform has, run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None
