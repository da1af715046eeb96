"""Work that nobody waits for at a connection: kept in a folder until it is fetched.

records  what is kept of jobs, as values
files    their scans, as files in a folder that one process locks
tables   the tables of a folder's database, and the queries that look into many rows
store    jobs and their outcomes in SQLite, beside these files; survives the end of the process
uploads  files of jobs that arrive in parts, over several connections
runner   finds the landmarks of what is queued, as one more client of the engine, in no hurry
"""

from app.jobs.records import KeptJob, Order
from app.jobs.runner import NO_HURRY_S, JobRunner
from app.jobs.uploads import OpenUpload, UploadStore

__all__ = [
    "NO_HURRY_S", "JobRunner", "KeptJob", "OpenUpload", "Order", "UploadStore",
]  # fmt: skip
