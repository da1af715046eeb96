"""What is kept of jobs, where only a part of what is to go has gone."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.errors import NotStored
from app.jobs import JobFolder
from app.jobs.store import JobStore
from app.jobs.uploads import UPLOAD_BYTES, UploadStore
from tests.unit.jobs import DAY_S, ENOUGH, MODEL, opened_databases, order


def test_file_that_the_disk_does_not_let_go_goes_when_it_is_tried_again(tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        store = JobStore(folder)
        job = store.accept(order(), b"scan", None)
        claim = store.claim([MODEL])
        assert claim is not None
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(Path, "unlink", refuse)
            with pytest.raises(NotStored):
                store.settle(claim, "done", "{}")
        assert [path.name for path in (tmp_path / "scans").iterdir()] == [job]
        store.settle(claim, "done", "{}")  # As the runner does.
        assert list((tmp_path / "scans").iterdir()) == []
        assert store.outcome("anna", job, 0)[2] == "{}"


def test_job_of_which_nothing_goes_goes_with_the_next_change(tmp_path: Path) -> None:
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        store = JobStore(folder)
        job, scans, away = store.accept(order(), b"scan", None), tmp_path / "scans", tmp_path / "x"
        scans.rename(away)
        scans.touch()  # As no folder, it takes no file, and lets none go.
        with pytest.raises(NotStored):
            store.accept(order(), b"scan", None)
        with pytest.raises(NotStored):
            UploadStore(folder).start(order(), 10)
        with pytest.raises(NotStored):
            store.remove("anna", job)
        scans.unlink()
        away.rename(scans)
        kept = UploadStore(folder).start(order("bert"), 10)
        assert [path.name for path in scans.iterdir()] == [kept.id]
        assert folder.usage.bytes == UPLOAD_BYTES


def test_upload_of_which_only_the_file_goes_is_charged_until_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_databases(monkeypatch)
    with closing(JobFolder(tmp_path, UPLOAD_BYTES, DAY_S)) as folder:
        store = UploadStore(folder)
        given_up = store.start(order(), 0)
        opened[0].execute("PRAGMA query_only = ON")
        with pytest.raises(NotStored):
            store.discard(given_up)
        opened[0].execute("PRAGMA query_only = OFF")
        store.start(order("bert"), 0)
        assert folder.usage.bytes == UPLOAD_BYTES


def test_upload_is_not_charged_after_a_process_that_ended_while_it_removed_it(
    tmp_path: Path,
) -> None:
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        store = UploadStore(folder)
        kept, removed = (store.start(order(), 10) for _ in range(2))
        job = JobStore(folder).accept(order(), b"scan", None)
    for gone in (removed.id, job):
        (tmp_path / "scans" / gone).unlink()
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        assert folder.usage.upload_bytes == UPLOAD_BYTES
        assert [one.id for one in UploadStore(folder).list_open("anna")] == [kept.id]
        # What was accepted is told of, whatever has become of its file.
        assert [one.id for one in JobStore(folder).list_jobs("anna")] == [job]


def test_upload_that_made_place_for_one_not_kept_is_charged_until_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file was gone, so that nobody could find it, or remove the rest."""

    def refuse(*_: object) -> str:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("app.jobs.uploads.IDLE_S", -1.0)
    monkeypatch.setattr("app.jobs.uploads.MAX_OPEN_OF_ONE", 1)
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        store = UploadStore(folder)
        store.start(order(), 10)
        with pytest.MonkeyPatch.context() as full:
            full.setattr("app.jobs.uploads.insert_job", refuse)
            with pytest.raises(NotStored):
                store.start(order(), 10)
        assert store.list_open("anna") == []
        store.start(order("bert"), 10)
        assert folder.usage.bytes == UPLOAD_BYTES
