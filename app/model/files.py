"""model folder -> its files: inside the folder, never elsewhere, and their hashes."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from app.durable import replacing
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
    if sha256 is not None and (found := hash_files(data)) != sha256:
        section = key.partition(".")[0]
        raise ModelRefused(
            f"{folder.name}: {section}.sha256: expected {sha256}, {', '.join(names)} has {found}"
        )
    return data


def hash_files(data: Iterable[bytes]) -> str:
    """Compute the SHA-256 of files one after the other, in hexadecimal."""
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
        # Editors on Windows write a mark before the text.
        return read_file(folder, key or name, name, sha256).decode("utf-8-sig")
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, a new one for all to read, or replace it.

    A service may be another user. A tensor of several names is stored under the first of them; the
    loader knows the others.

    Raises:
        OSError: The disk takes no more. So it is made in memory: safetensors would raise another.
    """
    stored: dict[object, str] = {}
    for name, tensor in sorted(tensors.items()):
        place = tensor.data_ptr(), tensor.shape, tensor.stride()
        stored.setdefault(place if tensor.numel() else name, name)
    content = safetensors.torch.save({name: tensors[name].contiguous() for name in stored.values()})
    with replacing(path) as partial:
        partial.write_bytes(content)
        partial.chmod(0o644)


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
