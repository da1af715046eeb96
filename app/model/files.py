"""model folder -> its files: inside the folder, never elsewhere, and their hashes."""

import hashlib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from app.errors import ModelRefused


def read_file(folder: Path, key: str, name: str, sha256: str | None = None) -> bytes:
    """Read a file that a manifest names, as ``read_files`` does."""
    return read_files(folder, key, [name], sha256)[0]


def read_files(
    folder: Path, key: str, names: Sequence[str], sha256: str | None = None
) -> list[bytes]:
    """Read files that a manifest names, once, and verify the hash of what was read.

    Args:
        folder: The model folder. The files must lie in it, also through links.
        key: The manifest's key, such as ``network.weights``, for messages.
        names: The files' names.
        sha256: The hash that the section of that key promises, in hexadecimal, of the files one
            after the other; None: no promise.

    Returns:
        The content of each file.

    Raises:
        ModelRefused: There is no such file, it leaves the folder, or they have another hash.
    """
    data = []
    for name in names:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ModelRefused(
                f"{folder.name}: {key}: expected a file in the folder, {name!r} leaves it"
            )
        if not path.is_file():
            raise ModelRefused(f"{folder.name}: {key}: expected a file {name!r}, found none")
        data.append(path.read_bytes())
    if sha256 is not None and (found := _hash(data)) != sha256:
        section = key.partition(".")[0]
        raise ModelRefused(
            f"{folder.name}: {section}.sha256: expected {sha256}, {', '.join(names)} has {found}"
        )
    return data


def _hash(data: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def read_text(folder: Path, name: str, key: str = "", sha256: str | None = None) -> str:
    """Read a text file of a model folder, as ``read_file`` does.

    Raises:
        ModelRefused: As ``read_file``, or it is not UTF-8.
    """
    try:
        return read_file(folder, key or name, name, sha256).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{folder.name}: {name}: expected UTF-8, got {error.reason}") from None


def read_tensors(folder: Path, key: str, name: str, sha256: str | None = None) -> dict[str, Tensor]:
    """Read a safetensors file of a model folder, as ``read_file`` does; nothing is mapped.

    Raises:
        ModelRefused: As ``read_file``, or it is not safetensors.
    """
    return parse_tensors(folder, key, read_file(folder, key, name, sha256))


def parse_tensors(folder: Path, key: str, data: bytes) -> dict[str, Tensor]:
    """Read the content of a safetensors file; folder and key are named in messages.

    Raises:
        ModelRefused: It is not safetensors.
    """
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise ModelRefused(f"{folder.name}: {key}: not safetensors: {error}") from None


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def update_hashes(folder: Path, text: str) -> str:
    """Put the true hashes into the text of a ``model.toml``; all else stays as it is.

    Raises:
        ModelRefused: The text is not TOML, or names a file that is not there.
    """
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelRefused(f"{folder.name}: model.toml is not TOML: {error}") from None
    named = (
        ("network", "weights"),
        ("network", "program"),
        ("shape", "mean"),
        ("refine", "folder"),
    )
    for section, key in named:
        found = table.get(section)
        if isinstance(found, dict) and isinstance(found.get(key), str):
            file = found[key] + ("/model.toml" if section == "refine" else "")
            members = found.get("members", []) if section == "network" else []
            if not isinstance(members, list) or not all(isinstance(one, str) for one in members):
                raise ModelRefused(f"{folder.name}: network.members: expected a list of files")
            data = read_files(folder, f"{section}.{key}", [file, *members])
            text = _set_hash(folder.name, text, section, key, _hash(data))
    return text


def update_precisions(text: str, shifts_mm: Mapping[Any, float]) -> str:
    """Replace the section ``[precision]`` in the text of a ``model.toml``.

    Args:
        text: The text.
        shifts_mm: Largest shift of a landmark in mm, by precision; empty: no section.

    Returns:
        The new text; the section stands before the first ``[[landmarks]]``.
    """
    text = re.sub(r"^\[precision\][^\[]*", "", text, flags=re.MULTILINE)
    if not shifts_mm:
        return text
    # Rounded up: it is an upper bound.
    lines = [f"{name} = {math.ceil(1e4 * mm) / 1e4}" for name, mm in shifts_mm.items()]
    section = "\n".join(["[precision]", *lines])
    head, landmarks, rest = text.partition("[[landmarks]]")
    return f"{head}{section}\n\n{landmarks}{rest}"


def _set_hash(name: str, text: str, section: str, key: str, value: str) -> str:
    """Replace the line ``sha256 = ...`` of a section, or add one after ``key``."""
    lines = text.splitlines(keepends=True)
    headers = [i for i, line in enumerate(lines) if re.match(r"\s*\[", line)]
    start = next((i for i in headers if re.match(rf"\s*\[\s*{section}\s*\]", lines[i])), None)
    if start is None:
        raise ModelRefused(f"{name}: expected a line [{section}] to write its sha256 under")
    end = next((i for i in headers if i > start), len(lines))
    for index in range(start, end):
        changed, count = re.subn(
            r"""^(\s*sha256\s*=\s*)(?:"[^"]*"|'[^']*')""", rf'\g<1>"{value}"', lines[index]
        )
        if count:
            return "".join([*lines[:index], changed, *lines[index + 1 :]])
    after = next(i for i in range(start, end) if re.match(rf"\s*{key}\s*=", lines[i])) + 1
    return "".join([*lines[:after], f'sha256 = "{value}"\n', *lines[after:]])
