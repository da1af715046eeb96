"""model folder -> its files: inside the folder, hashed, never elsewhere."""

import hashlib
from pathlib import Path

from app.errors import ModelRefused


def find_file(folder: Path, key: str, name: str) -> Path:
    """Find a file that a manifest names; it must lie in the folder itself, also through links.

    Args:
        folder: The model folder.
        key: The manifest's key, for the message.
        name: The file's name.

    Returns:
        Its path, links resolved.

    Raises:
        ModelRefused: There is no such file, or it leaves the folder.
    """
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ModelRefused(
            f"{folder.name}: {key}: expected a file in the folder, {name!r} leaves it"
        )
    if not path.is_file():
        raise ModelRefused(f"{folder.name}: {key}: expected a file {name!r}, found none")
    return path


def read_text(folder: Path, name: str) -> str:
    """Read a text file of a model folder.

    Raises:
        ModelRefused: There is no such file, it leaves the folder, or it is not UTF-8.
    """
    try:
        return find_file(folder, name, name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{folder.name}: {name}: expected UTF-8, got {error.reason}") from None


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(folder: Path, key: str, path: Path, expected: str) -> None:
    """Compare a file with the hash that the manifest promises.

    Raises:
        ModelRefused: They differ.
    """
    found = hash_file(path)
    if found != expected:
        raise ModelRefused(f"{folder.name}: {key}: expected {expected}, {path.name} has {found}")
