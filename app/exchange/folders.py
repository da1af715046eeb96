"""What importers share: JSON and checkpoints read as data, and a model folder written whole."""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from zipfile import BadZipFile, ZipFile, is_zipfile

import tomlkit
import torch
from torch import Tensor

from app.errors import BadParameter, ModelRefused
from app.model import build_network, split_name, write_selfcheck, write_tensors

MAX_JSON: Final = 16 << 20
"""Bytes of a JSON file: plans and bundles have some kilobytes."""

MAX_GROWTH: Final = 4
"""Times the size of its file that weights may have: networks may register a layer several times."""

UNREADABLE: Final = (
    pickle.UnpicklingError, RuntimeError, LookupError, TypeError, AttributeError, ValueError,
    EOFError, OSError, BadZipFile,
)  # fmt: skip
"""What a file may raise that is no checkpoint, or another one than expected."""


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        ModelRefused: There is no such file, it is too large, or holds something else.
    """
    where = path.parent.name
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelRefused(f"{where}: {path.name}: expected at most {MAX_JSON} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{where}: expected {path.name} to read: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{where}: {path.name}: expected an object")
    return content


@contextmanager
def refuse_unreadable(where: str, what: str) -> Iterator[None]:
    """Refuse a file of weights of which ``load_data`` or ``choose_weights`` make nothing.

    ``where`` is its name, ``what`` what it should be.

    Raises:
        ModelRefused: Something in this context raises one of ``UNREADABLE``.
    """
    try:
        yield
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise ModelRefused(
            f"{where}: expected {what} of nothing but tensors, numbers and text, "
            f"got {type(error).__name__}: {reason:.300}"
        ) from error


def load_data(path: Path, allowed: Sequence[Any] = ()) -> dict[str, Any]:
    """Read a dictionary of ``torch.save``; it can make nothing but tensors, numbers and text.

    Args:
        path: The file.
        allowed: What else it may call; see ``torch.serialization.safe_globals``.

    Raises:
        Exception: One of ``UNREADABLE``, if it holds anything else.
    """
    if is_zipfile(path):
        with ZipFile(path) as archive:
            inflated = sum(entry.file_size for entry in archive.infolist())
        _check_growth(path, inflated)
    with torch.serialization.safe_globals(list(allowed)):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise TypeError(f"expected a dictionary, got {type(content).__name__}")
    return content


def choose_weights(path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Choose the tensors of a network's state from a file, by their names without wrappers.

    Raises:
        Exception: One of ``UNREADABLE``, if they are larger than their file: a few bytes may stand
            for a tensor of any size.
    """
    tensors = {
        name.removeprefix("module."): one for name, one in state.items() if isinstance(one, Tensor)
    }
    _check_growth(path, sum(one.numel() * one.element_size() for one in tensors.values()))
    return tensors


def _check_growth(path: Path, size: int) -> None:
    if size > MAX_GROWTH * path.stat().st_size:
        raise ValueError(f"expected weights as large as their file, got {size} bytes")


def save_weights(
    path: Path,
    name: str,
    architecture: str,
    arguments: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> None:
    """Write weights as safetensors, if they are those of an allow-listed network.

    Args:
        path: The file to write.
        name: Of what is imported, for messages.
        architecture: The network, as ``module:Class``.
        arguments: Of its constructor.
        weights: Its state.

    Raises:
        ModelRefused: There is no such network, or it has other weights.
    """
    network = build_network(name, architecture, arguments, weights)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelRefused(
            f"{name}: {path.stem}: expected weights of {architecture} with the arguments given, "
            f"got {error!s:.300}"
        ) from error
    write_tensors(path, network.state_dict())


def write_folder(
    output: Path,
    document: Mapping[str, Any],
    landmarks: Sequence[str],
    origin: str,
    fill: Callable[[Path], object],
    *,
    allow_torchscript: bool = False,
) -> Path:
    """Write a model folder with its card, hashes and self-check.

    Args:
        output: The folder, named as the model, or ``NAME@VERSION``.
        document: The manifest, without what all imported models have alike.
        landmarks: Names, in the order of the channels.
        origin: Where the model comes from, for the card.
        fill: Writes the network into the folder.
        allow_torchscript: Whether its program may be TorchScript.

    Raises:
        BadParameter: The output exists.
        ModelRefused: The folder would not serve; nothing is written.
    """
    if output.exists():
        raise BadParameter(f"-o: expected a folder that is not there yet, {output} is")
    manifest = {
        "schema": 1,
        "name": split_name(output.name)[0],
        **document,
        "selfcheck": {"input": "noise:7", "expected": "selfcheck.safetensors"},
        "landmarks": [{"name": landmark} for landmark in landmarks],
    }
    card = (
        f"# {manifest['name']}\n\n{len(landmarks)} landmarks. Imported from {origin}\n\n"
        "Its errors on scans that it has not seen were not measured here.\n"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    # Written next to its final path and then renamed, so that nobody serves half of it.
    with TemporaryDirectory(prefix=".", dir=output.parent) as temporary:
        folder = Path(temporary) / output.name
        folder.mkdir()
        fill(folder)
        (folder / "model.toml").write_bytes(_encode(output, manifest))
        (folder / "README.md").write_text(card, encoding="utf-8", errors="replace")
        write_selfcheck(folder, allow_torchscript=allow_torchscript)
        folder.rename(output)
    return output


def _encode(output: Path, manifest: Mapping[str, Any]) -> bytes:
    try:
        return tomlkit.dumps(manifest).encode()
    except (TypeError, ValueError) as error:  # TOML has no null, and UTF-8 no half of a character.
        raise ModelRefused(
            f"{output.name}: expected text and numbers that model.toml can hold, got {error!s:.200}"
        ) from error
