"""The files of a folder of jobs: one per job, named by its id, and the lock of the folder."""

import mmap
import os
import shutil
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final

from app.durable import lock, sync, write_file
from app.errors import NotStored, StartupError, UnknownJob
from app.io import Content, find_scan

PIECE_BYTES: Final = 1 << 20
"""Of a scan that is taken out of its archive, in memory at a time."""


class ScanFiles:
    """The scans of jobs.

    Its methods raise UnknownJob if the file of a job is gone, because the job was removed, and
    NotStored if the disk takes or gives nothing.

    Args:
        folder: Made if it is not there; no other user of the machine may read it then. It is this
            process's until ``close``, at the latest until the process ends.

    Raises:
        StartupError: Another process uses the folder.
        OSError: It cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder / "scans"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # A folder that was there may be read by others, who could lock what they can open.
        self._lock = os.fdopen(os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600), "w")
        try:
            lock(self._lock)
        except OSError as error:
            self._lock.close()
            raise StartupError(
                f"expected a folder of jobs for this process alone, but another uses {folder}"
            ) from error

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    def write(self, job: str, content: Content) -> None:
        """Write the file of a job; afterwards it survives a power failure."""
        try:
            write_file(self._folder / job, content)
        except OSError as error:  # Of a new job no file can be missing, but the folder can.
            raise not_stored() from error

    def append(self, job: str, offset: int, content: Content) -> None:
        """Write what comes next of a job's file, all of it or nothing."""
        path = self._folder / job
        with _translate_errors(job):
            try:
                with path.open("r+b") as file:
                    file.seek(offset)
                    file.write(content)
            except OSError:
                # Written up to the last byte, the disk would not even take that a job is removed.
                os.truncate(path, offset)
                raise

    def sync(self, job: str) -> None:
        """Have what was appended to a file survive a power failure."""
        with _translate_errors(job):
            sync(self._folder / job)

    def size(self, job: str) -> int:
        """Return how many bytes of a file there are."""
        with _translate_errors(job):
            return (self._folder / job).stat().st_size

    def open(self, job: str, entry: int | None, max_bytes: int) -> memoryview:
        """Open a scan; it is mapped, so that it takes no memory that cannot be given back.

        Args:
            job: Of the scan.
            entry: Its number in the job's archive; None if the job's file is the scan.
            max_bytes: Of a scan in an archive.

        Raises:
            TooLarge: As ``find_scan``.
            BrokenVolume: The archive is corrupt there.
        """
        with _translate_errors(job):
            with (self._folder / job).open("rb") as file:
                content = _map(file)
            if entry is None:
                return content
            scan = find_scan(content, entry, max_bytes)
            free = shutil.disk_usage(self._folder).free
            if free < scan.size:  # Filled to the last byte, it would take nothing of others'.
                raise NotStored(
                    f"expected a disk with room for the {scan.size} bytes of a scan of the "
                    f"archive, got one with {free}"
                )
            with TemporaryFile(dir=self._folder) as file:
                stream = scan.open(lambda: None)
                while piece := stream.read(PIECE_BYTES):
                    file.write(piece)
                file.flush()
                return _map(file)

    def remove(self, job: str) -> None:
        """Remove the file of a job, if it is there."""
        with _translate_errors(job):
            (self._folder / job).unlink(missing_ok=True)

    def keep_only(self, jobs: Container[str]) -> set[str]:
        """Remove the files of all other jobs; gives the jobs whose files there are."""
        names = {path.name for path in self._folder.iterdir()}
        others = {name for name in names if name not in jobs}
        for name in others:
            (self._folder / name).unlink()
        return names - others


def not_stored() -> NotStored:
    """Say that the disk is full, or broken."""
    return NotStored("expected a disk that takes the job, got one that does not")


def unknown_job(job: str) -> UnknownJob:
    """Say that there is no such job of its owner."""
    return UnknownJob(f"expected a job of yours, which GET /v1/jobs lists, got {job[:64]!r}")


@contextmanager
def _translate_errors(job: str) -> Iterator[None]:
    """Say of which job a file is gone, and of any what the disk does not take."""
    try:
        yield
    except FileNotFoundError:
        raise unknown_job(job) from None
    except OSError as error:
        raise not_stored() from error


def _map(file: IO[bytes]) -> memoryview:
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
