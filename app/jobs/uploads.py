"""Uploads: the file of a job, in parts, over several connections if need be.

An upload is the row of a job that is not accepted yet, and its file as far as it has arrived. The
size of the file is the offset at which the next part begins, so that it survives the process as the
file does. It is charged as it arrives, to what all jobs may take. All methods block.
"""

import contextlib
import sqlite3
import time
from dataclasses import dataclass
from typing import Final

from app.errors import QueueFull, UnknownJob, WrongOffset
from app.io import Content
from app.jobs.folder import JOB_BYTES, RETRY_S, SCAN_BYTES, JobFolder
from app.jobs.records import Order
from app.jobs.tables import insert_job, order_of, queue_scans

MAX_OPEN: Final = 64
"""Uploads that have begun and not ended."""

MAX_OPEN_OF_ONE: Final = 16
"""Of these, of one owner."""

IDLE_S: Final = 600.0
"""An upload to which nothing was added for so long makes room for another: nobody may know its
address any more."""

UPLOAD_BYTES: Final = JOB_BYTES + SCAN_BYTES
"""That an upload counts as besides its file: as a job of one scan."""


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """The file of a job, as far as it has arrived.

    Attributes:
        id: Of the upload, and of the job that it becomes.
        length: Bytes of the whole file.
        offset: Bytes that have arrived.
        accepted: Whether it has become a job.
        expires_s: When it is removed unless more of it arrives, in seconds since 1970.
    """

    id: str
    order: Order
    length: int
    offset: int
    accepted: bool
    expires_s: float

    def check_next(self, offset: int, size: int = 0) -> None:
        """Check that a part is the next one, and belongs to the file.

        Raises:
            WrongOffset: It begins elsewhere, or ends behind the end of the file.
        """
        if offset != self.offset or offset + size > self.length:
            raise WrongOffset(
                f"expected bytes from {self.offset} to at most {self.length}, got {size} bytes "
                f"from {offset}"
            )


class UploadStore:
    """The uploads of a folder that are to become its jobs."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self.files = folder.files

    def start(self, order: Order, length: int) -> OpenUpload:
        """Begin an upload of so many bytes.

        Raises:
            TooLarge: It would never fit.
            QueueFull: It does not fit beside other jobs, or there are too many uploads in progress.
            NotStored: The disk took no more.
        """
        with self._folder.transaction() as db:
            self._folder.require_room(order.owner, length + UPLOAD_BYTES)
            self._make_place(db, order.owner)
            job = insert_job(db, order, 0, UPLOAD_BYTES)
            db.execute(
                "INSERT INTO upload(job, length, touched_s) VALUES (?, ?, ?)",
                (job, length, time.time()),
            )
        try:
            self.files.write(job, b"")
        except BaseException:
            self._folder.forget(job)
            raise
        return self.look(order.owner, job)

    def _make_place(self, db: sqlite3.Connection, owner: str) -> None:
        """Have a place free for another upload of an owner, if need be an idle one's."""
        uploads = db.execute(
            "SELECT id, owner, touched_s FROM job JOIN upload ON job = id WHERE NOT accepted"
            " ORDER BY touched_s"
        ).fetchall()
        own = [row for row in uploads if row["owner"] == owner]
        if len(own) >= MAX_OPEN_OF_ONE:
            oldest = own[0]
        elif len(uploads) >= MAX_OPEN:
            oldest = uploads[0]
        else:
            return
        if oldest["touched_s"] > time.time() - IDLE_S:
            raise QueueFull(
                f"expected at most {MAX_OPEN} unfinished uploads, and {MAX_OPEN_OF_ONE} of one "
                f"client, got one more; finish or delete others, which GET /v1/uploads lists",
                RETRY_S,
            )
        self._folder.drop(db, oldest["id"])

    def look(self, owner: str, upload: str) -> OpenUpload:
        """Find an upload of an owner.

        Raises:
            UnknownJob: There is none, or it is another's.
        """
        rows = self._folder.read(
            "SELECT * FROM job JOIN upload ON job = id WHERE owner = ? AND id = ?", owner, upload
        )
        try:
            (row,) = rows
            offset = row["length"] if row["accepted"] else self.files.size(upload)
        except (ValueError, UnknownJob):
            raise _unknown_upload(upload) from None
        expires_s = row["touched_s"] + self._folder.ttl_s
        return OpenUpload(
            upload, order_of(row), row["length"], offset, bool(row["accepted"]), expires_s
        )

    def list_open(self, owner: str) -> list[OpenUpload]:
        """List the uploads of an owner that have not become jobs, the newest first."""
        rows = self._folder.read(
            "SELECT id FROM job JOIN upload ON job = id WHERE owner = ? AND NOT accepted"
            " ORDER BY created_s DESC",
            owner,
        )
        uploads = []
        for row in rows:
            with contextlib.suppress(UnknownJob):  # It was removed meanwhile.
                uploads.append(self.look(owner, row["id"]))
        return uploads

    def append(self, upload: OpenUpload, content: Content) -> None:
        """Add the next part of a file; ``files.sync`` makes it durable.

        Raises:
            QueueFull: It does not fit beside other jobs.
            NotStored: The disk took no more.
            UnknownJob: It was removed meanwhile.
        """
        end = upload.offset + len(content)
        with self._folder.transaction() as db:
            self._folder.require_room(upload.order.owner, len(content))
            db.execute(
                "UPDATE job SET file_bytes = ?, bytes = ? WHERE id = ?",
                (end, end + UPLOAD_BYTES, upload.id),
            )
            db.execute("UPDATE upload SET touched_s = ? WHERE job = ?", (time.time(), upload.id))
        self.files.append(upload.id, upload.offset, content)

    def finish(self, upload: OpenUpload, scans: int | None) -> None:
        """Make a job of an upload that has arrived whole; once this returns, it will be run.

        Args:
            upload: All of its bytes are durable.
            scans: How many the archive holds; None if the file is a scan.

        Raises:
            QueueFull: Its scans do not fit beside other jobs.
            NotStored: The disk took no more.
            UnknownJob: It was removed meanwhile.
        """
        more = SCAN_BYTES * ((scans or 1) - 1)
        with self._folder.transaction() as db:
            self._folder.require_room(upload.order.owner, more)
            found = db.execute(
                "UPDATE job SET bytes = bytes + ?, created_s = ? WHERE id = ?",
                (more, time.time(), upload.id),
            )
            if not found.rowcount:
                raise _unknown_upload(upload.id)
            queue_scans(db, upload.id, upload.order.owner, scans)

    def discard(self, upload: OpenUpload) -> None:
        """Remove an upload that has not become a job."""
        self._folder.forget(upload.id)

    def sweep(self) -> float | None:
        """Remove uploads whose time has passed; gives the seconds until the next one's has."""
        with self._folder.transaction() as db:
            now = time.time()
            # In one step with the look at them: meanwhile one could become a job.
            late = db.execute(
                "SELECT id FROM job JOIN upload ON job = id WHERE NOT accepted AND touched_s <= ?",
                (now - self._folder.ttl_s,),
            ).fetchall()
            for row in late:
                self._folder.drop(db, row["id"])
            db.execute(
                "UPDATE upload SET touched_s = ?1 WHERE touched_s > ?1"
                " AND job IN (SELECT id FROM job WHERE NOT accepted)",
                (now,),
            )
            (first,) = db.execute(
                "SELECT min(touched_s) FROM upload JOIN job ON id = job WHERE NOT accepted"
            ).fetchone()
        return None if first is None else first + self._folder.ttl_s - now


def _unknown_upload(upload: str) -> UnknownJob:
    return UnknownJob(f"expected an upload of yours that has not expired, got {upload[:64]!r}")
