"""The tables of jobs, their rows, and queries that look into many.

More jobs slow none of them, but that ``NEXT_SCAN`` steps over scans that wait for their model, or
for room: that takes a millisecond or two for a thousand.
"""

import sqlite3
import time
import uuid
from typing import Any, Final

from app.io import Selection
from app.jobs.records import Order

LAYOUT: Final = 0
"""``PRAGMA user_version`` of the tables below, that of databases in which nobody has set one. To be
raised, and set, by a change that programs before it cannot read or write; columns and tables that
only come in addition, with defaults, are none."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS job(
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, request_id TEXT NOT NULL, model TEXT NOT NULL,
    format TEXT NOT NULL, candidates INTEGER NOT NULL, frame INTEGER, series INTEGER,
    created_s REAL NOT NULL, finished_s REAL, file_bytes INTEGER NOT NULL, bytes INTEGER NOT NULL,
    accepted INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS scan(
    id INTEGER PRIMARY KEY, job TEXT NOT NULL REFERENCES job ON DELETE CASCADE,
    owner TEXT NOT NULL, number INTEGER NOT NULL, entry INTEGER, state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, outcome TEXT);
CREATE TABLE IF NOT EXISTS upload(
    job TEXT PRIMARY KEY REFERENCES job ON DELETE CASCADE, length INTEGER NOT NULL,
    touched_s REAL NOT NULL);
CREATE INDEX IF NOT EXISTS scan_turn ON scan(state, owner, id);
CREATE INDEX IF NOT EXISTS scan_of_job ON scan(job, number);
CREATE INDEX IF NOT EXISTS scan_state ON scan(job, state);
CREATE INDEX IF NOT EXISTS job_of_owner ON job(owner, created_s);
CREATE INDEX IF NOT EXISTS job_finished ON job(finished_s);
CREATE INDEX IF NOT EXISTS job_arriving ON job(owner, created_s) WHERE NOT accepted;
"""

HELD: Final = """
CREATE TEMP TABLE held(owner TEXT PRIMARY KEY, queued INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO held SELECT owner, 0, sum(bytes) FROM job GROUP BY owner;
UPDATE held SET queued = (
    SELECT count(*) FROM scan WHERE state = 'queued' AND scan.owner = held.owner);
CREATE TEMP TRIGGER job_comes AFTER INSERT ON job BEGIN
    INSERT INTO held VALUES (new.owner, 0, new.bytes)
        ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TEMP TRIGGER job_changes AFTER UPDATE OF bytes ON job BEGIN
    UPDATE held SET bytes = bytes + new.bytes - old.bytes WHERE owner = new.owner;
END;
CREATE TEMP TRIGGER job_goes AFTER DELETE ON job BEGIN
    UPDATE held SET bytes = bytes - old.bytes WHERE owner = old.owner;
    DELETE FROM held WHERE owner = old.owner AND bytes = 0;
END;
CREATE TEMP TRIGGER scan_comes AFTER INSERT ON scan WHEN new.state = 'queued' BEGIN
    UPDATE held SET queued = queued + 1 WHERE owner = new.owner;
END;
CREATE TEMP TRIGGER scan_changes AFTER UPDATE OF state ON scan BEGIN
    UPDATE held SET queued = queued + (new.state = 'queued') - (old.state = 'queued')
        WHERE owner = new.owner;
END;
CREATE TEMP TRIGGER scan_goes AFTER DELETE ON scan WHEN old.state = 'queued' BEGIN
    UPDATE held SET queued = queued - 1 WHERE owner = old.owner;
END;
"""
"""What each owner holds, kept up to date: adding it up takes longer with each job."""

USAGE: Final = """
SELECT * FROM
    (SELECT coalesce(sum(queued), 0), coalesce(sum(bytes), 0) FROM held),
    (SELECT count(*), coalesce(sum(bytes), 0) FROM job JOIN upload ON job = id WHERE NOT accepted)
"""
"""The fields of ``Usage``."""

MOVE_TIMES: Final = (
    "UPDATE job SET finished_s = finished_s + ?",
    "UPDATE upload SET touched_s = touched_s + ?",
)

NEXT_SCAN: Final = """
SELECT * FROM scan WHERE state = 'queued' AND owner > ? AND attempts >= ?
    AND (SELECT model FROM job WHERE id = scan.job) IN (SELECT value FROM json_each(?))
    AND id NOT IN (SELECT value FROM json_each(?))
ORDER BY owner, id LIMIT 1
"""

WAITING: Final = """
SELECT model, count(*) AS scans FROM scan JOIN job ON job.id = scan.job
WHERE state = 'queued' AND model NOT IN (SELECT value FROM json_each(?)) GROUP BY model
"""

JOBS: Final = """
SELECT id, model, created_s, finished_s, (
    SELECT json_group_object(state, number) FROM (
        SELECT state, count(*) AS number FROM scan WHERE job = job.id GROUP BY state)) AS counts
FROM job WHERE owner = ? AND accepted
"""

SCANS: Final = """
SELECT json_group_array(json_object(
    'number', number, 'state', state,
    'tile', coalesce(json_extract(value, '$[0]'), 0),
    'tiles', coalesce(json_extract(value, '$[1]'), 0),
    'result', CASE state WHEN 'done' THEN ? || number END,
    'problem', CASE state WHEN 'failed' THEN json(outcome) END)) AS scans
FROM (
    SELECT number, state, outcome, value
    FROM scan LEFT JOIN json_each(?) ON key = scan.id WHERE job = ? ORDER BY number)
"""
"""JSON of a job's scans, as clients get it: parsing a thousand problems takes long."""


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
