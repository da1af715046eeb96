"""training -> checkpoint.pt and recipe.json: what it needs to go on, and whether it may."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.errors import StartupError
from app.training.files import CHECKPOINT, RECORD
from app.training.recipe import Recipe

Stateful = nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
"""Parts of a training whose state a checkpoint holds."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a training was begun with; to go on, it must be the same.

    Attributes:
        recipe: All its choices.
        landmarks: Names, in the order of the network's channels.
        train: Names of the specimens learned from.
        held_out: Names of those judged by.
        mirror: Whether mirror images were learned from, too.
    """

    recipe: Recipe
    landmarks: tuple[str, ...]
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    mirror: bool

    def plain(self) -> dict[str, Any]:
        """Give it as JSON has it."""
        values = asdict(self)
        values["recipe"]["intensity"] = self.recipe.intensity.model_dump()
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read what the training of a folder was begun with; None if nobody knows."""
    path = folder / RECORD
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def begin(folder: Path, record: Record) -> None:
    """Keep what a training is begun with, or check that it is the same if it goes on.

    Raises:
        StartupError: The folder has a checkpoint of another training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CHECKPOINT).exists():
        check_same(folder, record, folder / CHECKPOINT)
        return
    path = folder / RECORD
    path.write_text(json.dumps(record.plain(), indent=1) + "\n", encoding="utf-8")


def check_same(folder: Path, record: Record, remove: Path) -> None:
    """Check that the training that a folder holds was begun as a record says.

    Args:
        folder: The model folder.
        record: What a training would be begun with now.
        remove: What to delete, to begin anew.

    Raises:
        StartupError: It was begun otherwise.
    """
    differences = differences_of(read_record(folder) or {}, record.plain())
    if differences:
        raise StartupError(
            f"{folder} holds a checkpoint of another training: {'; '.join(differences)}. "
            f"To go on, repeat the command that began it; to begin anew, choose another folder "
            f"or delete {remove}"
        )


def save(folder: Path, parts: Mapping[str, Stateful], step: int) -> None:
    """Write a checkpoint; the old one stays until the new one is whole."""
    path = folder / CHECKPOINT
    partial = path.with_suffix(".partial")
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, partial)
    partial.replace(path)


def resume(folder: Path, parts: Mapping[str, Stateful]) -> int:
    """Load a checkpoint if there is one; returns the step to go on with."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


def differences_of(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Say in which values two records, as JSON has them, differ; nothing if they do not."""
    found = []
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict):
            found += differences_of(old[name], value, f"{prefix}{name}.")
        elif old.get(name) != value:
            was = _changes(old.get(name), value)
            found.append(f"{prefix}{name}: {was}")
    return found


def _changes(old: object, new: object) -> str:
    """Say how a value differs; of lists, only what is new or gone."""
    if isinstance(old, list) and isinstance(new, list) and set(map(str, old)) != set(map(str, new)):
        gone = [str(item) for item in old if item not in new]
        more = [str(item) for item in new if item not in old]
        parts = [f"without {', '.join(gone)}"] * bool(gone) + [f"with {', '.join(more)}"] * bool(
            more
        )
        return f"expected the same, got it {' and '.join(parts)}"
    return f"expected {'none' if old is None else old}, got {new}"
