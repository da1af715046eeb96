"""Work that nobody waits for at a connection: kept in a folder until it is fetched.

records  what is kept of jobs, as values
files    their scans, as files in a folder that one process locks
tables   the tables of a folder's database, their rows, and the queries that look into many
folder   the database and the files of a folder, within bounds; survive the end of the process
store    jobs and what became of them
uploads  files of jobs that arrive in parts, over several connections
runner   finds the landmarks of what is queued, as one more client of the engine, in no hurry
"""

from app.jobs.folder import JobFolder
from app.jobs.records import KeptJob, Order
from app.jobs.runner import NO_HURRY_S, JobRunner
from app.jobs.uploads import OpenUpload

__all__ = [
    "NO_HURRY_S", "JobFolder", "JobRunner", "KeptJob", "OpenUpload", "Order",
]  # fmt: skip
