"""``checkpoint.pt``: the state that a training resumes from."""

import io
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import nn

from app.durable import write_file
from app.errors import StartupError
from app.training.files import CHECKPOINT
from app.training.record import Record, check_same, write_record

Stateful = nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
"""Parts of a training whose state a checkpoint holds."""


def start(folder: Path, record: Record) -> None:
    """Write the record of a new training, or check that of one that is resumed.

    Raises:
        StartupError: The folder has a checkpoint of another training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CHECKPOINT).exists():
        check_same(folder, record, folder)
    else:
        write_record(folder, record)


def save(folder: Path, parts: Mapping[str, Stateful], step: int, *, exported: bool) -> None:
    """Write a checkpoint, which says whether its weights are in the model folder.

    The old one stays until the new one is complete.
    """
    state = {name: part.state_dict() for name, part in parts.items()}
    # By way of memory: of a disk that is full, torch.save says something else.
    content = io.BytesIO()
    torch.save(state | {"step": step, "exported": exported}, content)
    write_file(folder / CHECKPOINT, content.getbuffer())


def resume(folder: Path, parts: Mapping[str, Stateful]) -> tuple[int, bool]:
    """Load a checkpoint if there is one.

    Returns:
        The number of steps that are done, and whether the model folder has their weights.

    Raises:
        StartupError: It is damaged.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return 0, False
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        step, states = int(state["step"]), [(part, state[name]) for name, part in parts.items()]
    except (RuntimeError, EOFError, UnpicklingError, LookupError, TypeError, ValueError) as error:
        raise StartupError(
            f"expected {path} as a training has written it, got no checkpoint: restore it, or "
            "train into another folder"
        ) from error
    for part, inner in states:
        part.load_state_dict(inner)
    return step, state.get("exported", True)
