"""Change a ``model.toml``; what people have written into it, their comments and layout, stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import tomlkit
from tomlkit.exceptions import TOMLKitError

from app.durable import replacing
from app.errors import ModelRefused
from app.model.files import hash_files, read_files, read_text

NAMED: Final = (
    ("network", "weights"),
    ("network", "program"),
    ("shape", "mean"),
    ("refine", "folder"),
)
"""Keys that name what the ``sha256`` of their section vouches for."""


@contextmanager
def editing(
    folder: Path, new: tomlkit.TOMLDocument | None = None
) -> Iterator[tomlkit.TOMLDocument]:
    """Yield the manifest of a folder, and write it when the block ends without an error.

    Args:
        folder: The folder.
        new: What to begin with where it has no manifest; None: it must have one.

    Raises:
        ModelRefused: There is none, or it is not TOML.
    """
    document = read_document(folder) if new is None or (folder / "model.toml").exists() else new
    yield document
    with replacing(folder / "model.toml") as path:
        path.write_text(tomlkit.dumps(document), encoding="utf-8")
        path.chmod(0o644)


def read_document(folder: Path) -> tomlkit.TOMLDocument:
    """Read the manifest of a folder with its comments and layout.

    Raises:
        ModelRefused: There is none, or it is not TOML.
    """
    try:
        return tomlkit.parse(read_text(folder, "model.toml"))
    except TOMLKitError as error:
        raise ModelRefused(f"{folder.name}: model.toml is not TOML: {error}") from None


def update_hashes(folder: Path, document: tomlkit.TOMLDocument) -> None:
    """Put the true hashes of a folder's files into its manifest.

    Raises:
        ModelRefused: It names a file that is not there.
    """
    for section, key in NAMED:
        found = document.get(section)
        if isinstance(found, dict) and isinstance(found.get(key), str):
            file = found[key] + ("/model.toml" if section == "refine" else "")
            members = found.get("members", []) if section == "network" else []
            if not isinstance(members, list) or not all(isinstance(one, str) for one in members):
                raise ModelRefused(f"{folder.name}: network.members: expected a list of files")
            data = read_files(folder, f"{section}.{key}", [file, *members])
            found["sha256"] = hash_files(data)
