"""setting -> device: the one that was asked for, or an error; never another in silence."""

import torch

from app.errors import StartupError


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
