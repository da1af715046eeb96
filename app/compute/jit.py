"""Compiling loops: Numba on the CPU, and whether Triton's kernels run on a device.

Compiled code is cached in ``NUMBA_CACHE_DIR`` if that is set, else beside the sources or, where
they cannot be written, in the user's cache, so that only the first start on a machine takes the
seconds to compile. Where nothing can be written, or the disk is full, every start does.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import numba
import torch

APP: Final = Path(__file__).parents[1]
LOOPS: Final = ("compute", "model/cpu", "preprocessing/cpu", "voting/cpu")
"""Folders of ``app`` with compiled loops, also of those that loops elsewhere call."""


def cache_folder(parent: str) -> Path:
    """Return where loops as they are now are cached, by what ``NUMBA_CACHE_DIR`` says.

    Numba compiles a loop again if the file that it is in has changed, but not if another has, with
    a loop that it calls. So whatever the sources of all loops say has a folder of its own.
    """
    digest = sha256()
    for folder in LOOPS:
        for source in sorted((APP / folder).glob("*.py")):
            digest.update(source.read_bytes())
    beside = APP
    if not os.access(APP, os.W_OK):
        with suppress(RuntimeError):  # A user whom the machine does not know has no home.
            beside = Path.home() / ".cache" / "landmarkd"
    return Path(parent or beside / "__pycache__") / f"loops-{digest.hexdigest()[:16]}"


_config = vars(numba.config)
_config["CACHE_DIR"] = str(cache_folder(_config["CACHE_DIR"]))


def numba_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for the types of its arguments at the first call; it releases the GIL."""
    compiled: Any = numba.njit(function, nogil=True, error_model="numpy")
    with suppress(RuntimeError):  # Numba finds no folder to cache in.
        compiled.enable_caching()
        cache = vars(compiled)["_cache"]
        cache.save_overload = _if_possible(cache.save_overload)
    return cast("Callable[..., Any]", compiled)


def _if_possible(save: Callable[..., None]) -> Callable[..., None]:
    """Save what has been compiled, which runs without its file, too, as where a disk is full."""

    def save_overload(*compiled: object) -> None:
        with suppress(OSError):
            save(*compiled)

    return save_overload


def has_compiled_loops() -> bool:
    """Say whether loops as they are now have been compiled on this machine."""
    return any(Path(_config["CACHE_DIR"]).glob("*/*.nbi"))


def has_triton(device: torch.device) -> bool:
    """Say whether kernels written in Triton, which not every platform has, run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None
