"""The store of jobs: what is accepted is there, once, whatever comes between."""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.errors import NotStored, QueueFull, StartupError, TooLarge, UnknownJob
from app.jobs import JobFolder
from app.jobs.folder import JOB_BYTES, SCAN_BYTES
from app.jobs.records import Claim
from app.jobs.store import JobStore
from app.jobs.uploads import UploadStore
from tests.support.dicom_files import zipped
from tests.unit.jobs import DAY_S, ENOUGH, MODEL, full_disk, opened_databases, order, pass_time

SCAN = b"a scan"
LEAST = JOB_BYTES + SCAN_BYTES
"""What a job of a scan counts besides its file."""

Open = Callable[..., JobStore]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    """Open the store as the next process does, whatever the one before was doing."""
    with ExitStack() as stack:

        def make(max_bytes: int = ENOUGH, ttl_s: float = DAY_S, share: float = 1.0) -> JobStore:
            stack.close()
            folder = JobFolder(tmp_path / "jobs", max_bytes, ttl_s, share)
            stack.callback(folder.close)
            return JobStore(folder)

        yield make


@pytest.fixture
def store(reopen: Open) -> JobStore:
    return reopen()


def claimed(store: JobStore, after: str = "", **options: Any) -> Claim:
    claim = store.claim([MODEL], after, **options)
    assert claim is not None
    return claim


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "jobs" / "scans").iterdir())


def test_job_is_what_was_ordered(store: JobStore) -> None:
    job = store.accept(order(), SCAN, None)
    claim = claimed(store)
    assert (claim.job, claim.entry, claim.attempts, claim.order) == (job, None, 1, order())
    assert bytes(store.folder.files.open(claim.job, claim.entry, ENOUGH)) == SCAN
    assert store.claim([MODEL]) is None


def test_scans_of_an_archive_are_settled_one_by_one(store: JobStore, tmp_path: Path) -> None:
    job = store.accept(order(), zipped([b"one", b"two"]), 2)
    first, second = claimed(store), claimed(store)
    assert [
        bytes(store.folder.files.open(one.job, one.entry, ENOUGH)) for one in (first, second)
    ] == [b"one", b"two"]
    assert store.settle(second, "failed", "{}")
    assert files(tmp_path) == [job]
    assert store.find("anna", job).finished_s is None
    assert store.settle(first, "done", '{"a": 1}')
    assert files(tmp_path) == []
    found = store.find("anna", job)
    assert found.counts == {"done": 1, "failed": 1}
    states = [(scan["state"], scan["problem"]) for scan in json.loads(found.scans)]
    assert states == [("done", None), ("failed", {})]
    assert store.outcome("anna", job, 0) == ("done", "csv", '{"a": 1}')
    assert found.finished_s == pytest.approx(time.time(), abs=60)


def test_scan_is_settled_once(store: JobStore) -> None:
    job = store.accept(order(), SCAN, None)
    claim = claimed(store)
    assert store.settle(claim, "done", "first")
    assert not store.settle(claim, "done", "second")
    store.release(claim)
    assert store.outcome("anna", job, 0)[2] == "first"
    assert store.claim([MODEL]) is None


def test_scan_that_was_running_is_run_again_by_the_next_process(
    store: JobStore, reopen: Open
) -> None:
    job = store.accept(order(), SCAN, None)
    claimed(store)
    again = reopen()
    claim = claimed(again, suspect=True)
    assert (claim.job, claim.attempts) == (job, 2)
    assert bytes(again.folder.files.open(claim.job, claim.entry, ENOUGH)) == SCAN
    again.release_all()
    assert claimed(again).attempts == 2
    again.release(claim)
    assert claimed(again).attempts == 3


def test_scans_that_have_not_run_are_not_suspect(store: JobStore) -> None:
    store.accept(order(), SCAN, None)
    assert store.claim([MODEL], suspect=True) is None


def test_owners_take_turns(store: JobStore) -> None:
    many = store.accept(order("anna"), zipped([b"x"] * 5), 5)
    one = store.accept(order("bert"), SCAN, None)
    turns, after = [], ""
    for _ in range(4):
        claim = claimed(store, after)
        after = claim.order.owner
        turns.append(claim.job)
    assert turns == [many, one, many, many]


def test_scan_waits_for_its_model_and_holds_up_none_of_another(
    store: JobStore, reopen: Open
) -> None:
    waiting = store.accept(order(model="other"), zipped([b"x"] * 3), 3)
    job = store.accept(order(), SCAN, None)
    assert store.waiting([MODEL]) == {"other": 3}
    assert claimed(store).job == job
    assert store.claim([MODEL]) is None
    again = reopen()
    assert claimed(again, suspect=True).job == job
    assert again.claim([MODEL]) is None
    assert again.folder.usage.queued == 3
    claim = again.claim(["other"])
    assert claim is not None
    assert (claim.job, claim.attempts) == (waiting, 1)
    assert again.waiting([]) == {"other": 2}
    again.remove("anna", waiting)
    assert again.folder.usage.queued == 0


def test_job_is_nobody_elses(store: JobStore) -> None:
    job = store.accept(order("anna"), SCAN, None)
    assert [one.id for one in store.list_jobs("anna")] == [job]
    assert store.list_jobs("bert") == []
    for ask in (store.find, store.remove, partial(store.outcome, number=0)):
        with pytest.raises(UnknownJob):
            ask("bert", job)
    assert store.find("anna", job).counts == {"queued": 1}
    with pytest.raises(UnknownJob):
        store.outcome("anna", job, 1)


def test_job_that_is_removed_while_it_runs_leaves_nothing(store: JobStore, tmp_path: Path) -> None:
    job = store.accept(order(), SCAN, None)
    claim = claimed(store)
    store.remove("anna", job)
    with pytest.raises(UnknownJob):
        store.folder.files.open(claim.job, claim.entry, ENOUGH)
    assert not store.settle(claim, "done", "late")
    store.release(claim)
    assert store.list_jobs("anna") == []
    assert files(tmp_path) == []
    assert (store.folder.usage.queued, store.folder.usage.bytes) == (0, 0)


def test_scan_is_not_taken_for_the_one_that_was_removed_before_it(store: JobStore) -> None:
    removed = store.accept(order(), SCAN, None)
    late = claimed(store)
    store.remove("anna", removed)
    job = store.accept(order("bert"), SCAN, None)
    claim = claimed(store)
    assert not store.settle(late, "done", "{}")
    store.release(late)
    assert store.find("bert", job).counts == {"running": 1}
    assert store.settle(claim, "failed", "{}")


def test_what_is_kept_is_counted(store: JobStore) -> None:
    content = bytes(100_000)
    store.accept(order(), content, None)
    assert (store.folder.usage.queued, store.folder.usage.bytes) == (1, 100_000 + LEAST)
    claim = claimed(store)
    store.settle(claim, "done", "x" * (SCAN_BYTES + 1))
    assert (store.folder.usage.queued, store.folder.usage.bytes) == (0, LEAST + 1)


def test_what_is_kept_is_counted_again_by_the_next_process(store: JobStore, reopen: Open) -> None:
    store.accept(order("bert"), zipped([b"one", b"two"]), 2)
    job = store.accept(order(), SCAN, None)
    claimed(store)
    before = store.folder.usage
    again = reopen()
    assert again.folder.usage == replace(before, queued=before.queued + 1)
    again.remove("anna", job)
    assert again.folder.usage == replace(before, queued=2, bytes=before.bytes - LEAST - len(SCAN))


def test_jobs_over_the_quota_are_refused_until_there_is_room(reopen: Open, tmp_path: Path) -> None:
    small = reopen(2 * LEAST + len(SCAN))
    with pytest.raises(TooLarge, match="three quarters of LANDMARKD_JOBS_MAX_BYTES"):
        small.accept(order(), bytes(2 * LEAST), None)
    job = small.accept(order(), bytes(LEAST), None)
    with pytest.raises(QueueFull, match="delete jobs") as refused:
        small.accept(order("bert"), SCAN, None)
    assert refused.value.retry_after_s > 0
    assert files(tmp_path) == [job]
    small.settle(claimed(small), "done", "{}")
    small.accept(order("bert"), SCAN, None)


def test_one_owner_leaves_room_to_others(reopen: Open) -> None:
    store = reopen(4 * LEAST, share=0.5)
    store.accept(order(), SCAN, None)
    with pytest.raises(QueueFull):
        store.accept(order(), SCAN, None)
    store.accept(order("bert"), SCAN, None)


def test_quota_bounds_the_number_of_jobs_and_of_their_scans(reopen: Open) -> None:
    store = reopen(3 * JOB_BYTES)
    for _ in range(2):
        store.accept(order(), SCAN, None)
    with pytest.raises(QueueFull):
        store.accept(order(), SCAN, None)
    with pytest.raises(TooLarge):
        store.accept(order(), SCAN, 2 * JOB_BYTES // SCAN_BYTES + 1)


def test_finished_jobs_are_removed_when_their_time_has_passed(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = store.accept(order(), zipped([b"x"] * 2), 2)
    assert store.sweep() is None
    store.settle(claimed(store), "done", "{}")
    finished = store.accept(order("bert"), SCAN, None)
    store.settle(claimed(store, "anna"), "done", "{}")
    assert store.list_jobs("bert")[0].id == finished
    later = time.time() + DAY_S
    pass_time(monkeypatch, later)
    assert store.sweep() is None
    assert store.list_jobs("bert") == []
    assert [job.id for job in store.list_jobs("anna")] == [waiting]


def test_sweep_says_when_the_next_job_is_due(store: JobStore) -> None:
    store.accept(order(), SCAN, None)
    store.settle(claimed(store), "done", "{}")
    assert store.sweep() == pytest.approx(DAY_S, abs=60)


def test_clock_that_is_set_back_keeps_no_job_longer(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    pass_time(monkeypatch, now + 30 * DAY_S)
    store.accept(order(), SCAN, None)
    store.settle(claimed(store), "done", "{}")
    pass_time(monkeypatch, now)
    assert store.sweep() == pytest.approx(DAY_S)  # When it looks again, at others, too.
    pass_time(monkeypatch, now + DAY_S)
    assert store.sweep() is None
    assert store.list_jobs("anna") == []


def test_folder_is_one_process_alone(store: JobStore, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"for this process alone, but another uses .*jobs"):
        JobFolder(tmp_path / "jobs", ENOUGH, DAY_S)
    store.accept(order(), SCAN, None)


@pytest.mark.parametrize("name", ["jobs.sqlite", "scans"])
def test_folder_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"something else" * 100)
    with pytest.raises(StartupError, match="expected a folder for jobs"):
        JobFolder(tmp_path, ENOUGH, DAY_S)
    (tmp_path / name).unlink()
    JobFolder(tmp_path, ENOUGH, DAY_S).close()  # Nothing of the first attempt holds it.


def test_scans_of_a_folder_of_something_else_stay(tmp_path: Path) -> None:
    scan = tmp_path / "scans" / "head_7.nii.gz"
    scan.parent.mkdir()
    scan.write_bytes(b"a scan")
    with pytest.raises(StartupError, match=r"no jobs\.sqlite: put that back, .* delete scans"):
        JobFolder(tmp_path, ENOUGH, DAY_S)
    assert [path.name for path in tmp_path.rglob("*")] == ["scans", "head_7.nii.gz"]


def test_nobody_else_on_the_machine_can_read_the_folder(store: JobStore, tmp_path: Path) -> None:
    store.accept(order(), SCAN, None)
    for path in (tmp_path / "jobs", tmp_path / "jobs" / "scans", tmp_path / "jobs" / "jobs.sqlite"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_scan_is_mapped_and_not_read(store: JobStore) -> None:
    store.accept(order(), zipped([bytes(1 << 20)]), 1)
    opened = store.folder.files.open((claim := claimed(store)).job, claim.entry, ENOUGH)
    assert "/jobs/scans/" in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert opened.readonly
    assert bytes(opened) == bytes(1 << 20)


def test_acceptance_that_is_interrupted_leaves_nothing(
    store: JobStore, reopen: Open, tmp_path: Path
) -> None:
    """As a process leaves it that is killed between its first commit and its second."""
    with sqlite3.connect(tmp_path / "jobs" / "jobs.sqlite") as beside:
        store.accept(order(), SCAN, None)
        beside.execute("DELETE FROM scan")
        beside.execute("UPDATE job SET accepted = 0")
    beside.close()
    (tmp_path / "jobs" / "scans" / "half").write_bytes(b"written in ha")
    assert store.list_jobs("anna") == []
    again = reopen()
    assert files(tmp_path) == []
    assert again.folder.usage.bytes == 0


def test_disk_that_takes_no_file_refuses_the_job(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotStored):
        store.accept(order(), SCAN, None)
    assert files(tmp_path) == []
    assert store.folder.usage.bytes == 0


def test_disk_that_gives_nothing_is_told(store: JobStore) -> None:
    store.folder._db.set_progress_handler(lambda: 1, 1)  # noqa: SLF001 - queries end, as on a bad disk
    with pytest.raises(NotStored):
        store.list_jobs("anna")


def test_folder_that_is_gone_takes_no_job(store: JobStore, tmp_path: Path) -> None:
    (tmp_path / "jobs" / "scans").rmdir()
    with pytest.raises(NotStored):
        store.accept(order(), SCAN, None)
    with pytest.raises(NotStored):
        UploadStore(store.folder).start(order(), len(SCAN))


def test_disk_that_takes_nothing_leaves_no_job_charged(
    reopen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row stays as long as the disk does not even let it go."""
    opened = opened_databases(monkeypatch)
    store, content = reopen(2 * LEAST + len(SCAN)), bytes(LEAST)
    with full_disk(opened[0]), pytest.raises(NotStored):
        store.accept(order(), content, None)
    assert files(tmp_path) == []
    assert store.folder.usage.bytes > 0
    # It is gone even if nothing else comes of the next change.
    with pytest.raises(TooLarge):
        store.accept(order(), bytes(2 * LEAST), None)
    job = store.accept(order("bert"), content, None)
    assert store.folder.usage.bytes == LEAST + len(content)
    assert [one.id for one in store.list_jobs("bert")] == [job]
