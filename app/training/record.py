"""``recipe.json``: what a training was started with, and whether it may be resumed."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from app.durable import write_file
from app.errors import BadParameter, StartupError
from app.training.data.issues import shorten
from app.training.files import CHECKPOINT, RECORD, refuse_damaged
from app.training.options import Missing
from app.training.recipe import Recipe
from app.training.versions import find_taken_back

WEIGHTS_SUFFIXES: Final = (".safetensors", ".onnx", ".pt", ".ts")


@dataclass(frozen=True, slots=True)
class Record:
    """What a training was started with; it can be resumed with the same only.

    Attributes:
        recipe: All its choices.
        landmarks: Names, in the order of the network's channels.
        train: Names of the training specimens.
        held_out: Names of the held-out specimens.
        mirror: Whether mirror images were trained on as well.
        seen_before: Names of the specimens that the weights it started from had learned from.
        digests: Of each training specimen's scan and landmarks.
        voxels: Digests of the scans alone that the weights have learned from, in any training: a
            scan whose landmarks were corrected later is still one of them.
        start: SHA-256 of the weights that it started from; None: fresh ones.
    """

    recipe: Recipe
    landmarks: tuple[str, ...]
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    mirror: bool
    seen_before: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    voxels: tuple[str, ...] = ()
    start: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as it is after a round trip through JSON."""
        values = asdict(self)
        values["recipe"]["intensity"] = self.recipe.intensity.model_dump(exclude_unset=True)
        if not self.seen_before:  # As in records of before there was this key.
            del values["seen_before"]
        table: dict[str, Any] = json.loads(json.dumps(values))
        return table


class _Table(TypedDict, total=False):
    """What is read of a record; those of older releases lack some of it."""

    recipe: dict[str, Any]
    landmarks: list[str]
    train: list[str]
    held_out: list[str]
    mirror: bool
    seen_before: list[str]
    digests: dict[str, str]
    voxels: list[str]
    start: str | None


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a folder; empty if it has none.

    Raises:
        StartupError: It is damaged.
    """
    path = folder / RECORD
    if not path.exists():
        return {}
    with refuse_damaged(path):
        return {**TypeAdapter(_Table).validate_json(path.read_bytes())}


def seen_by(record: Mapping[str, Any]) -> set[str]:
    """List the specimens that the weights of a record have learned from, in any training."""
    return {*record.get("train", ()), *record.get("seen_before", ())}


def missing_of(record: Mapping[str, Any]) -> Missing:
    """Return how a landmark without a position counted in the training of a record."""
    recipe = record.get("recipe", {})
    return "absent" if recipe.get("missing") == "absent" else "unknown"


def write_record(folder: Path, record: Record) -> None:
    """Write the record of a folder."""
    text = json.dumps(record.to_json(), indent=1) + "\n"
    write_file(folder / RECORD, text.encode())


def check_same(folder: Path, record: Record, delete: Path) -> None:
    """Check that a folder's training was started with the same record.

    Args:
        folder: The model folder.
        record: What the training would be started with now.
        delete: What to delete to start again, for the message.

    Raises:
        StartupError: It was started with something else.
    """
    if differences := find_changes(folder, record):
        raise StartupError(
            f"{folder} holds a checkpoint of another training: {'; '.join(differences)}. "
            f"To resume, repeat the command that started it; to start again, choose another folder "
            f"or delete {delete}"
        )


def refuse_taken_back(folder: Path, record: Record) -> None:
    """Refuse to make the version of a model again that a person has taken back.

    Cases that are only held out make no other one.

    Raises:
        BadParameter: The one beside the folder was started with the same record.
    """
    if (aside := find_taken_back(folder)) is None:
        return
    held_out = read_record(aside).get("held_out", ())
    if not find_changes(aside, replace(record, held_out=tuple(held_out))):
        raise BadParameter(
            "expected other cases or options than those of the version that --back has taken out "
            f"of place, got the same, which would make it again: keep more, or delete {aside}"
        )


def find_changes(folder: Path, record: Record) -> list[str]:
    """List in words how a folder's training was started otherwise than it would be now."""
    old, new = read_record(folder), record.to_json()
    before, now = old.get("digests", {}), new.pop("digests")  # Old records have none.
    del new["voxels"]  # Of scans that the digests compare, and of the start.
    start = new.pop("start")
    differences = find_differences(old, new)
    if old.get("start", start) != start:  # Old records have none.
        expected = "the weights that it started from" if old["start"] else "none"
        got = "others" if start else "none"
        differences.append(f"--start: expected {expected}, got {got}")
    if changed := [name for name in now if before.get(name, now[name]) != now[name]]:
        differences.append(
            f"expected the same scans and landmarks, got others of {shorten(changed)}"
        )
    return differences


def check_alike(model: Path, fold: Path) -> None:
    """Check that one of a model's folds was trained as the model was, as far as both say.

    Raises:
        BadParameter: It was trained otherwise, so that its errors say little about the model.
    """
    mine, other = read_record(model), read_record(fold)
    if mine and other and (differences := find_differences(_choices(mine), _choices(other))):
        raise BadParameter(
            f"--folds: expected folds that were trained as {model} was, got {fold} "
            f"({'; '.join(differences)}): train all anew, or use --only"
        )


def _choices(record: Mapping[str, Any]) -> dict[str, Any]:
    """Take what was chosen from a record, but for what is drawn or follows from the scans."""
    chosen = {
        **record.get("recipe", {}),
        **{key: record.get(key) for key in ("landmarks", "mirror")},
    }
    return {name: value for name, value in chosen.items() if name not in ("seed", "tile_shape")}


def refuse_finished(folder: Path) -> None:
    """Refuse to train into the folder of a model whose training cannot be resumed.

    Raises:
        StartupError: Its weights would be replaced.
    """
    if (folder / CHECKPOINT).exists() or not (folder / "model.toml").exists():
        return
    if any(path.suffix in WEIGHTS_SUFFIXES for path in folder.iterdir()):
        raise StartupError(
            "expected a new folder, or one whose training can be resumed, got the finished model "
            f"{folder}: choose another folder, or delete this one"
        )


def find_differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List in words the values in which two records, as JSON has them, differ."""
    differences = []
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict):
            differences += find_differences(old[name], value, f"{prefix}{name}.")
        elif old.get(name) != value:
            differences.append(f"{prefix}{name}: {_describe_change(old.get(name), value)}")
    return differences


def _describe_change(old: object, new: object) -> str:
    """Describe how a value differs; of lists, only what was added or removed."""
    if isinstance(old, list) and isinstance(new, list) and set(map(str, old)) != set(map(str, new)):
        removed = [str(item) for item in old if item not in new]
        added = [str(item) for item in new if item not in old]
        parts = [
            f"{word} {', '.join(items)}"
            for word, items in (("without", removed), ("with", added))
            if items
        ]
        return f"expected the same, got it {' and '.join(parts)}"
    return f"expected {'none' if old is None else old}, got {new}"
