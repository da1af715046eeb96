"""Compiling loops: Numba on the CPU, and whether Triton's kernels run on a device.

Compiled code is cached beside the sources or, if that is set, in ``NUMBA_CACHE_DIR``, so that only
the first start on a machine takes the seconds to compile. Where nothing can be written, every start
does.
"""

from collections.abc import Callable
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numba
import torch

APP: Final = Path(__file__).parents[1]
LOOPS: Final = ("preprocessing", "voting/cpu")
"""Folders of ``app`` with compiled loops, also of those that loops elsewhere call."""


def cache_folder(parent: str) -> Path:
    """Return where loops as they are now are cached.

    Numba compiles a loop again if the file that it is in has changed, but not if another has, with
    a loop that it calls. So whatever the sources of all loops say has a folder of its own.

    Args:
        parent: What ``NUMBA_CACHE_DIR`` says.
    """
    digest = sha256()
    for folder in LOOPS:
        for source in sorted((APP / folder).glob("*.py")):
            digest.update(source.read_bytes())
    return Path(parent or APP / "__pycache__") / f"loops-{digest.hexdigest()[:16]}"


_config = vars(numba.config)
_config["CACHE_DIR"] = str(cache_folder(_config["CACHE_DIR"]))


def numba_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for the types of its arguments at the first call; it releases the GIL."""
    compiled: Callable[..., Any]
    try:
        compiled = numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # Numba finds no folder to cache in.
        compiled = numba.njit(function, nogil=True, error_model="numpy")
    return compiled


def has_triton(device: torch.device) -> bool:
    """Say whether kernels written in Triton, which not every platform has, run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None
