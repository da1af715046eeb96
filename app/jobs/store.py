"""Jobs and what became of them: SQLite in a folder, and their scans as files beside it.

A job is kept from its acceptance until its time to live has passed; its scans until the last of
them is settled. Whatever moment the process ends at: an accepted job is there, once, and each of
its scans is settled once. A process locks its folder, so that no scan is found by two.

All methods block; they may be called from any thread.
"""

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from app.errors import NotStored, QueueFull, StartupError, TooLarge, UnknownJob
from app.io import Content, Selection
from app.jobs.files import ScanFiles
from app.jobs.records import Claim, KeptJob, Order, State, Tiles, Usage
from app.jobs.tables import HELD, JOBS, NEXT_SCAN, SCANS, SCHEMA

JOB_BYTES: Final = 1 << 20
"""Counted for each job besides its scans, so that the quota bounds the number of jobs, too."""

SCAN_BYTES: Final = 64 << 10
"""Counted for each scan besides its file: what it and its answer take in the database, or more."""

RETRY_S: Final = 60
"""After which a client whose job finds no room may try again."""


class JobStore:
    """The jobs of a folder.

    Args:
        folder: Made if it is not there; nobody else on the machine may read it.
        max_bytes: Of all jobs together.
        ttl_s: Seconds that a finished job is kept.
        max_share: The part of ``max_bytes`` that one owner may take.

    Attributes:
        usage: What is kept, as of the last change.
        ttl_s: As given.

    Raises:
        StartupError: The folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path, max_bytes: int, ttl_s: float, max_share: float = 1.0) -> None:
        self.usage = Usage()
        self.ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._share = int(max_bytes * max_share)
        self._mutex = threading.Lock()
        try:
            self._files = ScanFiles(folder)
            database = folder / "jobs.sqlite"
            database.touch(mode=0o600)
            self._db = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            for pragma in ("auto_vacuum=FULL", "journal_mode=WAL", "foreign_keys=ON"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.executescript(SCHEMA + HELD)
            self._recover()
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"expected a folder for jobs, but {folder}: {error}") from error

    def close(self) -> None:
        """Let another process use the folder."""
        with self._mutex:
            self._db.close()
            self._files.close()

    def accept(self, order: Order, content: Content, scans: int | None) -> str:
        """Keep a new job; once this returns, it will be run, whatever happens.

        Args:
            order: What is to be found.
            content: The file of its scan, or of its scans.
            scans: How many the archive holds; None if the file is a scan.

        Returns:
            The job's id.

        Raises:
            TooLarge: It would never fit.
            QueueFull: It does not fit beside other jobs.
            NotStored: The disk took no more.
        """
        size = JOB_BYTES + SCAN_BYTES * (scans or 1) + len(content)
        with self._transaction() as db:
            self._require_room(order.owner, size)
            job = insert_job(db, order, len(content), size)
        try:
            self._files.write(job, content)
            with self._transaction() as db:
                queue_scans(db, job, order.owner, scans)
        except BaseException as error:
            self._forget(job)
            if isinstance(error, OSError):
                raise not_stored() from error
            raise
        return job

    def claim(self, after: str = "", *, suspect: bool = False) -> Claim | None:
        """Choose the scan to run next: the owners' in turn, of each the oldest.

        Args:
            after: Owner of the scan that was claimed last.
            suspect: Whether to choose among those only that were running when a process ended.

        Returns:
            The scan, which counts as running from now on; None if there is none.
        """
        with self._transaction() as db:
            row = db.execute(NEXT_SCAN, (after, suspect)).fetchone()
            row = row or db.execute(NEXT_SCAN, ("", suspect)).fetchone()
            if row is None:
                return None
            db.execute(
                "UPDATE scan SET state = 'running', attempts = attempts + 1 WHERE id = ?",
                (row["id"],),
            )
            job = db.execute("SELECT * FROM job WHERE id = ?", (row["job"],)).fetchone()
        return Claim(row["id"], row["job"], row["entry"], row["attempts"] + 1, order_of(job))

    def release(self, claim: Claim, *, counted: bool) -> None:
        """Have a scan that is running run again, if it is still there; this attempt may count."""
        with self._transaction() as db:
            db.execute(
                "UPDATE scan SET state = 'queued', attempts = attempts - ?"
                " WHERE id = ? AND state = 'running'",
                (0 if counted else 1, claim.id),
            )

    def settle(self, claim: Claim, state: Literal["done", "failed"], outcome: str) -> bool:
        """Keep what became of a scan, once; with the last of a job, its file goes.

        Args:
            claim: Of the scan.
            state: In which it ends.
            outcome: JSON of its answer or its problem.

        Returns:
            Whether it was still wanted.
        """
        with self._transaction() as db:
            settled = db.execute(
                "UPDATE scan SET state = ?, outcome = ? WHERE id = ? AND state = 'running'",
                (state, outcome, claim.id),
            ).rowcount
            extra = settled * max(0, len(outcome.encode()) - SCAN_BYTES)
            db.execute("UPDATE job SET bytes = bytes + ? WHERE id = ?", (extra, claim.job))
            finished = db.execute(
                "UPDATE job SET finished_s = ?, bytes = bytes - file_bytes, file_bytes = 0"
                " WHERE id = ? AND finished_s IS NULL AND NOT EXISTS"
                " (SELECT 1 FROM scan WHERE job = job.id AND state IN ('queued', 'running'))",
                (time.time(), claim.job),
            ).rowcount
        if finished:
            self._files.remove(claim.job)
        return bool(settled)

    def open_scan(self, claim: Claim, max_bytes: int) -> memoryview:
        """Open the file of a scan.

        Args:
            claim: Of the scan.
            max_bytes: Of a scan in an archive.

        Raises:
            UnknownJob: The job was removed.
            NotStored: The disk has no room for a scan out of an archive.
            LandmarkdError: As ``ScanFiles.open``.
        """
        try:
            return self._files.open(claim.job, claim.entry, max_bytes)
        except FileNotFoundError:
            raise unknown_job(claim.job) from None
        except OSError as error:
            raise not_stored() from error

    def find(
        self, owner: str, job: str, path: str = "", progress: Mapping[int, Tiles] | None = None
    ) -> KeptJob:
        """Find a job of an owner, and its scans.

        Args:
            owner: Of the job.
            job: Its id.
            path: What comes before a scan's number in the path of its landmarks.
            progress: Of scans that are running, by their ids.

        Raises:
            UnknownJob: There is none, or it is another's.
        """
        found = self._find(f"{JOBS} AND id = ?", owner, job)
        if not found:
            raise unknown_job(job)
        (scans,) = self._read(SCANS, path, json.dumps(progress or {}), job)
        return replace(found[0], scans=scans["scans"])

    def list_jobs(self, owner: str) -> list[KeptJob]:
        """List the jobs of an owner, the newest first, up to a thousand."""
        return self._find(f"{JOBS} ORDER BY created_s DESC LIMIT 1000", owner)

    def outcome(self, owner: str, job: str, number: int) -> tuple[State, str, str | None]:
        """Return the state of a scan, the format of its job, and the JSON of its outcome.

        Raises:
            UnknownJob: There is no such scan, or it is another's.
        """
        rows = self._read(
            "SELECT state, format, outcome FROM scan JOIN job ON job.id = scan.job"
            " WHERE job.owner = ? AND job.id = ? AND number = ? AND accepted",
            owner, job, number,
        )  # fmt: skip
        if not rows:
            raise unknown_job(f"{job}/scans/{number}")
        return rows[0]["state"], rows[0]["format"], rows[0]["outcome"]

    def remove(self, owner: str, job: str) -> None:
        """Remove a job of an owner, whatever its state.

        Raises:
            UnknownJob: There is none, or it is another's.
        """
        if not self._read("SELECT 1 FROM job WHERE owner = ? AND id = ? AND accepted", owner, job):
            raise unknown_job(job)
        self._forget(job)

    def sweep(self) -> float | None:
        """Remove the jobs whose time has passed; gives the seconds until the next one's has."""
        with self._transaction() as db:
            now = time.time()
            db.execute("DELETE FROM job WHERE finished_s <= ?", (now - self.ttl_s,))
            (first,) = db.execute("SELECT min(finished_s) FROM job").fetchone()
        return None if first is None else max(first + self.ttl_s - now, 0.0)

    def _find(self, query: str, *values: object) -> list[KeptJob]:
        rows = self._read(query, *values)
        return [KeptJob(**{**row, "counts": json.loads(row["counts"])}) for row in rows]

    def _require_room(self, owner: str, size: int) -> None:
        (held,) = self._db.execute(
            "SELECT total(bytes) FROM held WHERE owner = ?", (owner,)
        ).fetchone()
        if size > self._share:
            raise TooLarge(f"expected a job of at most {self._share} bytes, got {size}")
        if held + size > self._share or self.usage.bytes + size > self._max_bytes:
            raise QueueFull(
                f"expected jobs of at most {self._max_bytes} bytes in all, and {self._share} of "
                f"one client, got {size} more; delete jobs that are not needed any more",
                RETRY_S,
            )

    def _recover(self) -> None:
        """Bring in order what a process has left that ended at any moment."""
        with self._transaction() as db:
            db.execute("DELETE FROM job WHERE NOT accepted AND id NOT IN (SELECT job FROM upload)")
            db.execute("UPDATE scan SET state = 'queued' WHERE state = 'running'")
            unfinished = db.execute("SELECT id FROM job WHERE finished_s IS NULL")
            needed = {row["id"] for row in unfinished}
        self._files.keep_only(needed)

    def _forget(self, job: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM job WHERE id = ?", (job,))
        self._files.remove(job)

    def _read(self, query: str, *values: object) -> list[dict[str, Any]]:
        with self._mutex:
            return [dict(row) for row in self._db.execute(query, values)]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Do all of something or nothing of it.

        Raises:
            NotStored: The disk took no more.
        """
        with self._mutex:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                usage = Usage(
                    *self._db.execute(
                        "SELECT coalesce(sum(queued), 0), coalesce(sum(bytes), 0) FROM held"
                    ).fetchone()
                )
                self._db.execute("COMMIT")
                self.usage = usage
            except BaseException as error:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):
                    raise not_stored() from error
                raise


def insert_job(db: sqlite3.Connection, order: Order, file_bytes: int, size: int) -> str:
    """Insert a job that is not accepted yet; gives its id."""
    job = uuid.uuid4().hex
    db.execute(
        "INSERT INTO job(id, owner, request_id, model, format, candidates, frame, series,"
        " created_s, file_bytes, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (job, order.owner, order.request_id, order.model, order.format, order.candidates,
         order.selection.frame, order.selection.series, time.time(), file_bytes, size),
    )  # fmt: skip
    return job


def queue_scans(db: sqlite3.Connection, job: str, owner: str, scans: int | None) -> None:
    """Accept a job, with the scans of its archive, or None of a single scan."""
    entries = [None] if scans is None else range(scans)
    db.executemany(
        "INSERT INTO scan(job, owner, number, entry, state) VALUES (?, ?, ?, ?, 'queued')",
        [(job, owner, number, entry) for number, entry in enumerate(entries)],
    )
    db.execute("UPDATE job SET accepted = 1 WHERE id = ?", (job,))


def order_of(job: sqlite3.Row | dict[str, Any]) -> Order:
    """Read the order of a job's row."""
    return Order(
        owner=job["owner"],
        request_id=job["request_id"],
        model=job["model"],
        format=job["format"],
        candidates=bool(job["candidates"]),
        selection=Selection(job["frame"], job["series"]),
    )


def not_stored() -> NotStored:
    """Say that the disk is full, or broken."""
    return NotStored("expected a disk that takes the job, got one that does not")


def unknown_job(job: str) -> UnknownJob:
    """Say that there is no such job of its owner."""
    return UnknownJob(f"expected a job of yours, which GET /v1/jobs lists, got {job[:64]!r}")
