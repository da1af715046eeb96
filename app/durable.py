"""Files that are there whole or not at all, and survive a power failure."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PARTIAL: Final = ".partial"
"""How the names end of what a process that was killed has left."""

NAME_END: Final = 40
"""Characters of a file's name in that of what takes its place."""


def write_file(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a file, or replace it; see ``replacing``."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file, which takes its place once the block ends without an error.

    Whenever the process or the machine stops, the file is as it was before, or as it shall be.
    Afterwards it is as it shall be.
    """
    # Several processes may write one file at once, such as the first folds of a training; and the
    # name may be as long as any may be.
    partial = path.with_name(f".{path.name[-NAME_END:]}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        if error.errno and error.filename in (None, str(partial)):  # A full disk names no file.
            error.filename = str(path)  # The name that its user knows.
        raise
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
