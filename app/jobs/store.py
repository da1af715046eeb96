"""Jobs and what became of them.

A job is kept from its acceptance until its time to live has passed; its scans until the last of
them is settled, each once. All methods block; they may be called from any thread.
"""

import json
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from app.io import Content
from app.jobs.files import unknown_job
from app.jobs.folder import JOB_BYTES, SCAN_BYTES, JobFolder
from app.jobs.records import Claim, KeptJob, Order, State, Tiles
from app.jobs.tables import JOBS, NEXT_SCAN, SCANS, WAITING, insert_job, order_of, queue_scans


class JobStore:
    """The jobs of a folder."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder

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
        with self.folder.transaction() as db:
            self.folder.require_room(order.owner, size)
            job = insert_job(db, order, len(content), size)
        try:
            self.folder.files.write(job, content)
            with self.folder.transaction() as db:
                queue_scans(db, job, order.owner, scans)
        except BaseException:
            self.folder.forget(job)
            raise
        return job

    def claim(
        self,
        models: Collection[str],
        after: str = "",
        aside: Collection[int] = (),
        *,
        suspect: bool = False,
    ) -> Claim | None:
        """Choose the scan to run next: the owners' in turn, of each the oldest.

        Args:
            models: Names of the models that can be run; the scans of others wait for theirs.
            after: Owner of the scan that was claimed last.
            aside: Ids of scans that are not chosen.
            suspect: Whether to choose among those only that were running when a process ended.

        Returns:
            The scan, which counts as running from now on; None if there is none.
        """
        with self.folder.transaction() as db:
            among = suspect, json.dumps([*models]), json.dumps([*aside])
            row = db.execute(NEXT_SCAN, (after, *among)).fetchone()
            row = row or db.execute(NEXT_SCAN, ("", *among)).fetchone()
            if row is None:
                return None
            db.execute(
                "UPDATE scan SET state = 'running', attempts = attempts + 1 WHERE id = ?",
                (row["id"],),
            )
            job = db.execute("SELECT * FROM job WHERE id = ?", (row["job"],)).fetchone()
        return Claim(row["id"], row["job"], row["entry"], row["attempts"] + 1, order_of(job))

    def waiting(self, models: Collection[str]) -> dict[str, int]:
        """Count the scans that wait for other models than these, by the names of theirs."""
        rows = self.folder.read(WAITING, json.dumps([*models]))
        return {row["model"]: row["scans"] for row in rows}

    def release(self, claim: Claim, *, tried: bool = True) -> None:
        """Have a scan that is running run again, if it is there; ``tried``: the attempt counts."""
        with self.folder.transaction() as db:
            db.execute(
                "UPDATE scan SET state = 'queued', attempts = attempts - ?"
                " WHERE id = ? AND job = ? AND state = 'running'",
                (not tried, claim.id, claim.job),
            )

    def release_all(self) -> None:
        """Have all that is running run again, as if it had not been tried: nothing runs it now."""
        with self.folder.transaction() as db:
            db.execute(
                "UPDATE scan SET state = 'queued', attempts = attempts - 1 WHERE state = 'running'"
            )

    def settle(self, claim: Claim, state: Literal["done", "failed"], outcome: str) -> bool:
        """Keep the JSON of a scan's answer or problem, once; with the last of a job, its file goes.

        Returns:
            Whether it was still wanted.

        Raises:
            NotStored: The disk took no more, or did not let the file go; another call goes on.
        """
        with self.folder.transaction() as db:
            settled = db.execute(
                "UPDATE scan SET state = ?, outcome = ?"
                " WHERE id = ? AND job = ? AND state = 'running'",
                (state, outcome, claim.id, claim.job),
            ).rowcount
            extra = settled * max(0, len(outcome.encode()) - SCAN_BYTES)
            db.execute("UPDATE job SET bytes = bytes + ? WHERE id = ?", (extra, claim.job))
            db.execute(
                "UPDATE job SET finished_s = ?, bytes = bytes - file_bytes, file_bytes = 0"
                " WHERE id = ? AND finished_s IS NULL AND NOT EXISTS"
                " (SELECT 1 FROM scan WHERE job = job.id AND state IN ('queued', 'running'))",
                (time.time(), claim.job),
            )
            unfinished = "SELECT 1 FROM job WHERE id = ? AND finished_s IS NULL"
            is_needed = db.execute(unfinished, (claim.job,)).fetchone() is not None
        if not is_needed:
            self.folder.files.remove(claim.job)
        return bool(settled)

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
        (scans,) = self.folder.read(SCANS, path, json.dumps(progress or {}), job)
        return replace(found[0], scans=scans["scans"])

    def list_jobs(
        self, owner: str, after: tuple[float, str] = (math.inf, ""), limit: int = 1000
    ) -> list[KeptJob]:
        """List the jobs of an owner, the newest first.

        Args:
            owner: Of the jobs.
            after: ``created_s`` and ``id`` of the job before, which may have been removed since.
            limit: How many at most.
        """
        query = f"{JOBS} AND (created_s, id) < (?, ?) ORDER BY created_s DESC, id DESC LIMIT ?"
        return self._find(query, owner, *after, limit)

    def outcome(self, owner: str, job: str, number: int) -> tuple[State, str, str | None]:
        """Return the state of a scan, the format of its job, and the JSON of its outcome.

        Raises:
            UnknownJob: There is no such scan, or it is another's.
        """
        rows = self.folder.read(
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
        query = "SELECT 1 FROM job WHERE owner = ? AND id = ? AND accepted"
        if not self.folder.read(query, owner, job):
            raise unknown_job(job)
        self.folder.forget(job)

    def sweep(self) -> float | None:
        """Remove the jobs whose time has passed; gives the seconds until the next one's has."""
        with self.folder.transaction() as db:
            now = time.time()
            # Where the clock was set back: nobody would be rid of them until that time has come.
            db.execute("UPDATE job SET finished_s = ?1 WHERE finished_s > ?1", (now,))
            db.execute("DELETE FROM job WHERE finished_s <= ?", (now - self.folder.ttl_s,))
            (first,) = db.execute("SELECT min(finished_s) FROM job").fetchone()
        return None if first is None else first + self.folder.ttl_s - now

    def _find(self, query: str, *values: object) -> list[KeptJob]:
        rows = self.folder.read(query, *values)
        return [KeptJob(**{**row, "counts": json.loads(row["counts"])}) for row in rows]
