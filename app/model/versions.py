"""Which version of a model a name means, where several are side by side.

A folder is called ``NAME``, or ``NAME@VERSION``. A request for ``NAME@VERSION`` means that version,
in whichever folder it is; one for ``NAME`` means the newest.
"""

from collections.abc import Iterable
from typing import TypeAlias

VersionKey: TypeAlias = tuple[object, ...]


def split_name(wanted: str) -> tuple[str, str | None]:
    """Split ``NAME@VERSION``; the version is None if there is none."""
    name, at, version = wanted.partition("@")
    return name, version if at else None


def choose_version(wanted: str, known: Iterable[tuple[str, str, str]]) -> str | None:
    """Choose the folder of a model.

    Args:
        wanted: A name, perhaps with a version.
        known: Folder, name and version of each model.

    Returns:
        The folder: that of the version, or of the newest; among equals the one that is called as
        ``wanted``. None if there is none.
    """
    name, version = split_name(wanted)
    fitting = [
        (version_key(one), folder == wanted, folder)
        for folder, model, one in known
        if model == name and version in (None, one)
    ]
    return max(fitting)[2] if fitting else None


def newest_first(folders: Iterable[str]) -> list[str]:
    """Sort folders by the names of their models, of each first what may be the newest.

    That is the folder without a version, then the highest one.
    """

    def age(folder: str) -> tuple[bool, VersionKey, str]:
        version = split_name(folder)[1]
        return version is None, version_key(version or ""), folder

    return sorted(sorted(folders, key=age, reverse=True), key=lambda one: split_name(one)[0])


def version_key(version: str) -> VersionKey:
    """Return what orders versions: 1.10 is newer than 1.9, and 1.0 than 1.0-rc1.

    Parts between dots are compared as numbers if they are some, which are newer than text. What
    follows a plus says nothing.
    """
    release, dash, suffix = version.partition("+")[0].partition("-")
    return _parts(release), not dash, _parts(suffix)


def _parts(text: str) -> tuple[tuple[bool, int, str], ...]:
    return tuple(
        (True, int(part), "") if part.isascii() and part.isdigit() else (False, 0, part)
        for part in text.split(".")
    )
