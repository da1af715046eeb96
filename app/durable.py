"""Files that are there whole or not at all, survive a power failure, or are one process's alone."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

try:
    import fcntl
except ModuleNotFoundError:  # Windows, on which the client and the command run.
    fcntl = None  # type: ignore[assignment]

PARTIAL: Final = ".partial"
"""How the names end of what a process that was killed has left."""

NAME_END: Final = 40
"""Characters of a file's name in that of what takes its place."""


def write_file(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a file, or replace it; see ``replacing``.

    A pipe or device is written to, and stays; so does the output of this process, a file or not.
    """
    if (stream := _find_stream(path)) is not None:
        with open(stream, "wb", closefd=False) as file:  # Behind what another command has written.
            file.write(content)
        return
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with replacing(path) as partial:
        partial.write_bytes(content)


def _find_stream(path: Path) -> int | None:
    """Find which standard stream of this process a path leads to, as ``/dev/stdout`` does."""
    for descriptor in (1, 2):
        with suppress(OSError):  # There is none, or no such file.
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file, which takes its place once the block ends without an error.

    Whenever the process or the machine stops, the file is as it was before, or as it shall be.
    Afterwards it is as it shall be. Who may read and write it stays as it was; nobody else reads
    meanwhile what takes its place.
    """
    # Several processes may write one file at once, such as the first folds of a training; and the
    # name may be as long as any may be.
    partial = path.with_name(f".{path.name[-NAME_END:]}.{os.getpid()}{PARTIAL}")
    try:
        with naming(path, instead_of=partial):
            before = path.stat() if path.exists() else None
            if before is not None:
                partial.touch(mode=0o600)
            yield partial
            sync(partial)
            if before is not None:
                _keep_access(partial, before)
            partial.replace(path)
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _keep_access(partial: Path, before: os.stat_result) -> None:
    """Have a file be whose another was, and for whom."""
    now = partial.stat()
    # Only root gives a file to another user; to a group of theirs, anybody.
    if now.st_gid != before.st_gid:
        with suppress(PermissionError):
            os.chown(partial, -1, before.st_gid)
    if now.st_uid != before.st_uid:
        with suppress(PermissionError):
            os.chown(partial, before.st_uid, -1)
    if now.st_mode != before.st_mode:  # Else a file system without modes might refuse it.
        partial.chmod(stat.S_IMODE(before.st_mode))


@contextmanager
def naming(path: Path, *, instead_of: Path | None = None) -> Iterator[None]:
    """Have faults of the system name what is written, as a full disk names no file.

    Args:
        path: The name that its user knows.
        instead_of: One that they do not know, such as of what takes its place.
    """
    try:
        yield
    except OSError as error:
        if error.errno and error.filename in (None, str(instead_of)):
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, survive a power failure."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    except PermissionError:
        if is_folder:
            return  # Windows opens none.
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(file: IO[bytes] | IO[str], *, wait: bool = False) -> None:
    """Have a file for this process alone, and this opening of it, until it is closed.

    The system unlocks for a process that is killed.

    Args:
        file: An open file.
        wait: Whether to wait until nobody else has it.

    Raises:
        BlockingIOError: Another has it.
        OSError: Its file system, or the system, has no locks.
    """
    if fcntl is None:
        raise OSError("expected a system with flock, got one without")
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
