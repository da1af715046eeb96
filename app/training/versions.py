"""Versions of a model folder: the one in its place, and the one before, beside it.

The other versions are in a folder of the model's name with a dot in front, which the service does
not look into. Each is in a folder of the model's own name, as its manifest demands.
"""

import ctypes
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from app.durable import lock, write_file
from app.errors import BadParameter, ModelRefused, StartupError
from app.model import editing, hash_file, read_document, read_manifest, update_hashes
from app.training.files import CHECKPOINT, CURVES, FOLDS, HISTORY, OUTCOMES, TABLES

NEXT: Final = "next"
BEFORE: Final = "before"
LOCK: Final = "lock"
ORIGIN: Final = "origin"
"""File beside the next version: the hash of the manifest of the version that it is made of."""

MEASURED: Final = (
    "region_margin_mm", "region_spread_mm", "region_scale_mm", "region95_mm", "interval_scale",
)  # fmt: skip
"""Keys of a ``model.toml`` that say what was measured with its weights."""

AT_FDCWD: Final = -100
RENAME_EXCHANGE: Final = 2
"""Of Linux, linux/fcntl.h and linux/fs.h."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Change the versions of a model folder alone, where they can be exchanged at all.

    Raises:
        BadParameter: The folder's name is that of one version, and would not fit the next one.
        StartupError: Another process does, or the system cannot exchange folders.
    """
    name, at, _ = folder.resolve().name.partition("@")
    if at:
        raise BadParameter(
            f"expected a folder of the model's name alone, as its versions take turns in it, got "
            f"{folder}: copy it to {folder.resolve().with_name(name)}"
        )
    versions = _beside(folder, NEXT).parents[1]
    versions.mkdir(exist_ok=True)
    with (versions / LOCK).open("w") as file:
        try:
            lock(file)
        except OSError as error:
            raise StartupError(
                f"expected {folder} to be changed by one landmarkd learn at a time, but another is "
                "at work; wait for its end"
            ) from error
        with TemporaryDirectory(dir=versions) as one, TemporaryDirectory(dir=versions) as other:
            _exchange(Path(one), Path(other))
        yield


def prepare_next(folder: Path) -> Path:
    """Copy a model folder to where its next version is made, under a number that none had.

    Kept cases know by its number which version has answered them.

    Returns:
        The copy, without what belongs to the training of this version, or was measured of it.
    """
    candidate = _beside(folder, NEXT)
    version = _unused_version(folder)
    origin = candidate.with_name(ORIGIN)
    origin.unlink(missing_ok=True)  # First: what a process that is killed leaves is not whole.
    shutil.rmtree(candidate, ignore_errors=True)
    leave = shutil.ignore_patterns(CHECKPOINT, CURVES, FOLDS, HISTORY, OUTCOMES, TABLES)
    shutil.copytree(folder, candidate, ignore=leave)
    with editing(candidate) as document:
        document["version"] = version
    write_file(origin, hash_file(folder / "model.toml").encode())
    return candidate


def find_unfinished(folder: Path) -> Path | None:
    """Find the next version of a model folder as it is now, whose training was interrupted.

    Returns:
        Its folder; None if there is no such training, or the model has been changed meanwhile, so
        that another version is to be made of it.
    """
    candidate = _beside(folder, NEXT)
    origin = candidate.with_name(ORIGIN)
    if not (candidate / CHECKPOINT).exists() or not origin.exists():
        return None
    return candidate if origin.read_text() == hash_file(folder / "model.toml") else None


def finish(candidate: Path) -> None:
    """Delete what a version that was compared does not need to be trained on any more."""
    for path in candidate.rglob(CHECKPOINT):
        path.unlink()


def keep_measured(before: Path, after: Path) -> None:
    """Give a version the regions and widths of intervals of the one before; training drops them."""
    for name in reversed(read_manifest(before).folders):
        known = _tables(read_document(before / name).unwrap())
        with editing(after / name) as document:
            for table, old in zip(_tables(document), known, strict=True):
                table.update({key: old[key] for key in MEASURED if key in old})
            update_hashes(after / name, document)


def drop_measured(document: dict[str, Any]) -> None:
    """Drop what was measured with other weights: precisions, regions, widths of intervals."""
    document.pop("precision", None)
    for table in _tables(document):
        for key in MEASURED:
            table.pop(key, None)


def _tables(document: dict[str, Any]) -> list[dict[str, Any]]:
    """List the tables of a manifest in which ``MEASURED`` may stand."""
    one_by_one = (*document.get("landmarks", ()), *document.get("measurements", ()))
    return [document.get("voting", {}), document.get("shape", {}), *one_by_one]


def next_version(version: str) -> str:
    """Count the last number of a version up, such as 2.2.2 to 2.2.3; one without gets a first."""
    before, number, behind = _split(version)
    return f"{before}{number + 1}{behind}"


def put_in_place(candidate: Path, folder: Path) -> None:
    """Exchange a model folder for its next version, at once; the old one stays beside it.

    A process that is killed meanwhile leaves one of both in place, and loses neither.

    Raises:
        StartupError: The system cannot do that at once.
    """
    before = _beside(folder, BEFORE)
    # Until they are exchanged, this is a version after that in place, which is none to go back to.
    shutil.rmtree(before, ignore_errors=True)
    before.parent.mkdir(exist_ok=True)
    candidate.rename(before)
    _exchange(before, folder)


def put_back(folder: Path) -> tuple[str, str]:
    """Exchange a model folder for the version before.

    Returns:
        The versions that were and that are in place.

    Raises:
        BadParameter: There is none before.
        StartupError: The system cannot do that at once.
    """
    before = _beside(folder, BEFORE)
    now = read_manifest(folder).version
    old = read_manifest(before).version if (before / "model.toml").exists() else None
    if old is None or not _is_before(old, now):
        raise BadParameter(f"--back: expected a version before {now} of {folder.name}, found none")
    with exclusive(folder):
        _exchange(before, folder)
    return now, old


def find_taken_back(folder: Path) -> Path | None:
    """Find the version that ``put_back`` has put beside a model folder; None if there is none."""
    aside = _beside(folder, BEFORE)
    with suppress(ModelRefused):  # As of a folder that has no version beside it.
        if _is_before(read_manifest(folder).version, read_manifest(aside).version):
            return aside
    return None


def _unused_version(folder: Path) -> str:
    """Find the next number behind all those of the versions that there are of a model folder.

    The last one is always there: what takes the place of another folder has a later number, or
    changes places with it.
    """
    last = read_manifest(folder).version
    for other in (_beside(folder, BEFORE), _beside(folder, NEXT)):
        with suppress(ModelRefused):  # There is none, or only what a process that was killed left.
            version = read_manifest(other).version
            last = version if _is_before(last, version) else last
    return next_version(last)


def _is_before(version: str, other: str) -> bool:
    """Say whether counting a version up leads to another one."""
    before, number, behind = _split(version)
    other_before, other_number, other_behind = _split(other)
    return (before, behind) == (other_before, other_behind) and number < other_number


def _split(version: str) -> tuple[str, int, str]:
    """Split a version into its last number and what is around it; one without has a 0 to come."""
    if (found := re.search(r"\d+(?=\D*$)", version)) is None:
        return f"{version}.", 0, ""
    return version[: found.start()], int(found[0]), version[found.end() :]


def _beside(folder: Path, which: str) -> Path:
    """Name the folder of a version: beside a link's target, by the link's name, the model's."""
    name = folder.absolute().name
    return folder.resolve().parent / f".{name}" / which / name


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two folders in one step, which nobody sees half done.

    Links stay, and lead to what was exchanged.
    """
    one, other = one.resolve(), other.resolve()
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = (AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)
    if rename is None or rename(*names):
        reason = os.strerror(ctypes.get_errno()) if rename else "no renameat2"
        raise StartupError(
            f"expected a system that exchanges {one} and {other} in one step (Linux, renameat2, on "
            f"a file system that has it), got: {reason}; put the model folder on another one"
        )
