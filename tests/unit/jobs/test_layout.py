"""The layout of the database: another one's is refused, and stays as it is."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.errors import StartupError
from app.jobs import JobFolder
from app.jobs.store import JobStore
from tests.unit.jobs import DAY_S, ENOUGH, order


def change(folder: Path, statement: str) -> None:
    """Change the database of a folder that no service uses."""
    with closing(sqlite3.connect(folder / "jobs.sqlite", isolation_level=None)) as db:
        db.execute(statement)


def kept(folder: Path) -> list[str]:
    """Open a folder as a service does; gives the ids of its jobs."""
    with closing(JobFolder(folder, ENOUGH, DAY_S)) as opened:
        return [job.id for job in JobStore(opened).list_jobs("anna")]


def test_folder_that_a_later_version_has_written_is_refused(tmp_path: Path) -> None:
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        JobStore(folder).accept(order(), b"a scan", None)
    change(tmp_path, "PRAGMA user_version = 1")
    before = (tmp_path / "jobs.sqlite").read_bytes()
    with pytest.raises(
        StartupError, match=r"jobs\.sqlite in layout 0, .*, got layout 1: .* LANDMARKD_JOBS"
    ):
        JobFolder(tmp_path, ENOUGH, DAY_S)
    assert (tmp_path / "jobs.sqlite").read_bytes() == before
    assert len(list((tmp_path / "scans").iterdir())) == 1


@pytest.mark.parametrize(
    "statement",
    ["DROP TABLE upload", "ALTER TABLE job ADD COLUMN more TEXT", "ANALYZE"],
    ids=["before uploads in parts", "one more column", "statistics"],
)
def test_folder_of_a_version_that_writes_alike_goes_on(tmp_path: Path, statement: str) -> None:
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        job = JobStore(folder).accept(order(), b"a scan", None)
    change(tmp_path, statement)
    assert kept(tmp_path) == [job]
