"""The folder of a service's jobs: a SQLite database with files beside it, within bounds.

Whatever moment the process ends at: an accepted job is there, once. A process locks its folder, so
that no scan is found by two. All methods block; they may be called from any thread.
"""

import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from app.errors import NotStored, QueueFull, StartupError, TooLarge
from app.jobs.files import ScanFiles, not_stored
from app.jobs.records import Usage
from app.jobs.tables import HELD, LAYOUT, MOVE_TIMES, SCHEMA, USAGE

JOB_BYTES: Final = 1 << 20
"""Counted for each job besides its scans, so that the quota bounds the number of jobs, too."""

SCAN_BYTES: Final = 64 << 10
"""Counted for each scan besides its file: what it and its answer take in the database, or more."""

RETRY_S: Final = 60
"""After which a client whose job finds no room may try again."""

CLOCK_S: Final = 60.0
"""That the clock may be off before it counts as set."""


class JobFolder:
    """The folder of the jobs of one process.

    Args:
        path: Made if it is not there; nobody else on the machine may read it.
        max_bytes: Of all jobs together.
        ttl_s: Seconds that a finished job is kept.
        max_share: The part of ``max_bytes`` that one owner may take.

    Attributes:
        usage: What is kept, as of the last change.

    Raises:
        StartupError: The folder cannot be used, or another process uses it.
    """

    def __init__(self, path: Path, max_bytes: int, ttl_s: float, max_share: float = 1.0) -> None:
        self.ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._share = int(max_bytes * max_share)
        self._mutex = threading.Lock()
        self._abandoned = set[str]()
        self._zero_s = time.time() - elapsed_s()
        database = path / "jobs.sqlite"
        try:
            if not database.exists() and any(path.glob("scans/*")):
                raise StartupError(
                    f"expected a folder of jobs, or none with scans, got {path}, which has files "
                    "in scans but no jobs.sqlite: put that back, or name another folder in "
                    "LANDMARKD_JOBS, or delete scans if nobody needs them any more"
                )
            with ExitStack() as opened:
                self.files = opened.enter_context(closing(ScanFiles(path)))
                database.touch(mode=0o600)
                connection = sqlite3.connect(
                    database, isolation_level=None, check_same_thread=False
                )
                self._db = opened.enter_context(closing(connection))
                # Before anything is written into it.
                (layout,) = self._db.execute("PRAGMA user_version").fetchone()
                if layout != LAYOUT:
                    raise StartupError(
                        f"expected {database} in layout {LAYOUT}, as this version of landmarkd "
                        f"writes it, got layout {layout}: start the version that wrote it, or name "
                        "another folder in LANDMARKD_JOBS"
                    )
                self._db.row_factory = sqlite3.Row
                for pragma in ("auto_vacuum=FULL", "journal_mode=WAL", "foreign_keys=ON"):
                    self._db.execute(f"PRAGMA {pragma}")
                self._db.executescript(SCHEMA + HELD)
                self._recover()
                opened.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise StartupError(
                f"LANDMARKD_JOBS: expected a folder for jobs, but {path}: {error}"
            ) from error

    def close(self) -> None:
        """Let another process use the folder."""
        with self._mutex:
            self._db.close()
            self.files.close()

    def read(self, query: str, *values: object) -> list[dict[str, Any]]:
        """Return the rows that a query finds.

        Raises:
            NotStored: The disk did not give them.
        """
        with self._mutex, _as_not_stored():
            return [dict(row) for row in self._db.execute(query, values)]

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Do all of something or nothing of it, by the clock as it is now.

        Where the clock was set, as of a machine without a battery after each start, the times from
        which lives are counted move with it: else what is kept would expire at once.

        Raises:
            NotStored: The disk took no more.
        """
        with self._mutex, _as_not_stored():
            # Each by itself: they are gone even if what follows is refused for want of room. That
            # may remove files, after which a full disk lets them go.
            for job in tuple(self._abandoned):
                with suppress(NotStored, sqlite3.OperationalError):
                    self.files.remove(job)
                    self._db.execute("DELETE FROM job WHERE id = ?", (job,))
                    self._abandoned.remove(job)
            zero_s = time.time() - elapsed_s()
            if abs(zero_s - self._zero_s) < CLOCK_S:
                zero_s = self._zero_s
            with self._db:  # Commits what was begun, or rolls it back.
                self._db.execute("BEGIN IMMEDIATE")
                if zero_s != self._zero_s:
                    for move in MOVE_TIMES:
                        self._db.execute(move, (zero_s - self._zero_s,))
                yield self._db
                usage = Usage(*self._db.execute(USAGE).fetchone())
            self.usage, self._zero_s = usage, zero_s

    def require_room(self, owner: str, size: int) -> None:
        """Check, in a transaction, that an owner may keep so many bytes more.

        Raises:
            TooLarge: They would never fit.
            QueueFull: They do not fit beside other jobs.
        """
        held, used = self._db.execute(
            "SELECT total(bytes) FILTER (WHERE owner = ?), total(bytes) FROM held", (owner,)
        ).fetchone()
        if size > self._share:
            raise TooLarge(
                f"expected a job of at most {self._share} bytes, got {size}; the operator's limit "
                "is three quarters of LANDMARKD_JOBS_MAX_BYTES"
            )
        if held + size > self._share or used + size > self._max_bytes:
            raise QueueFull(
                f"expected jobs of at most {self._max_bytes} bytes in all, and {self._share} of "
                f"one client, got {size} more; delete jobs that are not needed any more",
                RETRY_S,
            )

    def forget(self, job: str) -> None:
        """Remove a job, or an upload; its file goes first, which gives room on a full disk.

        Raises:
            NotStored: The disk does not let all of it go; the rest then goes with the next change:
                what was not accepted, or has no file, can be found and removed by nobody.
        """
        with self._mutex:
            self._abandoned.add(job)
        self.files.remove(job)
        with self.transaction() as db:
            db.execute("DELETE FROM job WHERE id = ?", (job,))

    def drop(self, db: sqlite3.Connection, job: str) -> None:
        """Remove a job, or an upload, as ``forget`` does, but in a transaction.

        Raises:
            NotStored: The disk does not let the file go.
        """
        self.files.remove(job)
        self._abandoned.add(job)  # The transaction may fail.
        db.execute("DELETE FROM job WHERE id = ?", (job,))

    def _recover(self) -> None:
        """Bring in order what a process has left that ended at any moment."""
        with self.transaction() as db:
            db.execute("DELETE FROM job WHERE NOT accepted AND id NOT IN (SELECT job FROM upload)")
            db.execute("UPDATE scan SET state = 'queued' WHERE state = 'running'")
            unfinished = db.execute("SELECT id FROM job WHERE finished_s IS NULL")
            needed = {row["id"] for row in unfinished}
            # It was being removed, file first: nobody could find it, or remove the rest.
            lost = [(job,) for job in needed - self.files.keep_only(needed)]
            db.executemany("DELETE FROM job WHERE id = ? AND NOT accepted", lost)


@contextmanager
def _as_not_stored() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise not_stored() from error


def elapsed_s() -> float:
    """Read a clock that nobody sets, which goes on while the machine sleeps if it can."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
