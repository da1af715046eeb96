"""Uploads: what has arrived of a file is there, whatever comes between, and is charged."""

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest

from app.errors import NotStored, QueueFull, TooLarge, UnknownJob, WrongOffset
from app.jobs import JobFolder, uploads
from app.jobs.store import JobStore
from app.jobs.uploads import MAX_OPEN, MAX_OPEN_OF_ONE, UPLOAD_BYTES, OpenUpload, UploadStore
from tests.support.full_disk import limited_files
from tests.support.killing import killed_at
from tests.unit.jobs import DAY_S, ENOUGH, MODEL, full_disk, opened_databases, order, pass_time

FILE = bytes(range(200))

T = TypeVar("T")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[JobFolder]:
    folder = JobFolder(tmp_path, ENOUGH, DAY_S)
    yield folder
    folder.close()


@pytest.fixture
def store(folder: JobFolder) -> UploadStore:
    return UploadStore(folder)


@pytest.fixture
def jobs(folder: JobFolder) -> JobStore:
    return JobStore(folder)


def add(store: UploadStore, upload: OpenUpload, content: bytes) -> OpenUpload:
    store.append(upload, content)
    return replace(upload, offset=upload.offset + len(content))


def test_upload_is_a_job_once_it_is_finished(store: UploadStore, jobs: JobStore) -> None:
    upload = store.start(order(), len(FILE))
    assert jobs.list_jobs("anna") == []
    middle = add(store, upload, FILE[:150])
    assert store.look("anna", upload.id).offset == 150
    assert jobs.folder.usage.queued == 0
    store.finish(add(store, middle, FILE[150:]), None)
    (job,) = jobs.list_jobs("anna")
    assert job.id == upload.id
    found = store.look("anna", upload.id)
    assert (found.offset, found.accepted, found.order) == (len(FILE), True, order())
    claim = jobs.claim([MODEL])
    assert claim is not None
    assert (bytes(jobs.folder.files.open(claim.job, claim.entry, 0)), claim.order) == (
        FILE,
        order(),
    )
    jobs.settle(claim, "done", "{}")
    # The file is gone, and a client that asks late still learns that all has arrived.
    assert store.look("anna", upload.id).offset == len(FILE)


def test_part_that_is_not_the_next_or_too_long_is_refused(store: UploadStore) -> None:
    upload = add(store, store.start(order(), len(FILE)), FILE[:50])
    upload.check_next(50, 150)
    for offset, size in ((0, 1), (49, 1), (51, 1), (50, 151)):
        with pytest.raises(WrongOffset, match="from 50 to at most 200"):
            upload.check_next(offset, size)


def test_bytes_are_charged_as_they_arrive_and_given_back(tmp_path: Path) -> None:
    with closing(JobFolder(tmp_path, 2 * UPLOAD_BYTES + 300, DAY_S)) as folder:
        store = UploadStore(folder)
        with pytest.raises(TooLarge):
            store.start(order(), UPLOAD_BYTES + 301)
        first, second = (store.start(order(), len(FILE)) for _ in range(2))
        assert folder.usage.bytes == 2 * UPLOAD_BYTES
        first = add(store, first, FILE)
        second = add(store, second, FILE[:100])
        assert folder.usage.bytes == 2 * UPLOAD_BYTES + 300
        with pytest.raises(QueueFull):
            store.append(second, b"x")
        assert store.look("anna", second.id).offset == 100
        with pytest.raises(QueueFull):
            store.finish(first, 2)
        store.discard(first)
        assert folder.usage.bytes == UPLOAD_BYTES + 100
        add(store, second, FILE[100:])


def test_unfinished_uploads_are_counted(tmp_path: Path) -> None:
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        store, jobs = UploadStore(folder), JobStore(folder)
        jobs.accept(order(), FILE, None)
        first, second = (store.start(order(), len(FILE)) for _ in range(2))
        add(store, first, FILE[:100])
        assert (folder.usage.uploads, folder.usage.upload_bytes) == (2, 2 * UPLOAD_BYTES + 100)
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        store = UploadStore(folder)
        assert (folder.usage.uploads, folder.usage.upload_bytes) == (2, 2 * UPLOAD_BYTES + 100)
        store.finish(add(store, store.look("anna", first.id), FILE[100:]), None)
        assert (folder.usage.uploads, folder.usage.upload_bytes) == (1, UPLOAD_BYTES)
        store.discard(second)
        assert (folder.usage.uploads, folder.usage.upload_bytes) == (0, 0)


def test_no_call_takes_longer_with_more_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in instructions of SQLite's virtual machine."""
    opened = opened_databases(monkeypatch)
    with closing(JobFolder(tmp_path, ENOUGH, DAY_S)) as folder:
        store, uploads, taken = JobStore(folder), UploadStore(folder), Counter[str]()

        def count(name: str, call: Callable[[], T]) -> T:
            opened[0].set_progress_handler(lambda: taken.update([name]), 1)
            result = call()
            opened[0].set_progress_handler(None, 1)
            return result

        def call_all() -> dict[str, int]:
            taken.clear()
            job = count("accept", lambda: store.accept(order("bert"), FILE, None))
            claim = count("claim", lambda: store.claim([MODEL], after="anna"))
            assert claim is not None
            count("settle", lambda: store.settle(claim, "done", "{}"))
            count("find", lambda: store.find("bert", job))
            count("sweep", store.sweep)
            count("remove", lambda: store.remove("bert", job))
            upload = count("start", lambda: uploads.start(order("bert"), len(FILE)))
            count("append", lambda: uploads.append(upload, FILE))
            count("list uploads", lambda: uploads.list_open("bert"))
            count("sweep uploads", uploads.sweep)
            count("finish", lambda: uploads.finish(upload, None))
            return dict(taken)

        few = call_all()
        for _ in range(100):
            store.accept(order("bert"), FILE, None)
            upload = uploads.start(order("bert"), len(FILE))
            uploads.finish(add(uploads, upload, FILE), None)
            claim = store.claim([MODEL])
            assert claim is not None
            store.settle(claim, "done", "{}")
        assert {name: steps for name, steps in call_all().items() if steps > few[name] + 50} == {}


def test_number_of_unfinished_uploads_is_bounded(
    store: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(MAX_OPEN_OF_ONE):
        last = store.start(order(), 10)
    with pytest.raises(QueueFull, match="of one client"):
        store.start(order(), 10)
    store.start(order("bert"), 10)
    store.finish(add(store, last, FILE[:10]), None)
    store.start(order(), 10)
    monkeypatch.setattr(uploads, "MAX_OPEN", MAX_OPEN_OF_ONE + 2)
    store.start(order("bert"), 10)
    with pytest.raises(QueueFull):
        store.start(order("clara"), 10)
    assert MAX_OPEN > MAX_OPEN_OF_ONE


def test_idle_upload_makes_room_for_another(
    store: UploadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen that were given up kept a client out for a day, and those of four clients all."""
    given_up, *others = (store.start(order(), 10) for _ in range(MAX_OPEN_OF_ONE))
    now = time.time()
    pass_time(monkeypatch, now + uploads.IDLE_S)
    for upload in others:
        add(store, upload, FILE[:5])
    store.start(order(), 10)
    with pytest.raises(UnknownJob):
        store.look("anna", given_up.id)
    assert not (tmp_path / "scans" / given_up.id).exists()
    with pytest.raises(QueueFull):
        store.start(order(), 10)
    monkeypatch.setattr(uploads, "MAX_OPEN", MAX_OPEN_OF_ONE)
    with pytest.raises(QueueFull):
        store.start(order("bert"), 10)
    pass_time(monkeypatch, now + 2 * uploads.IDLE_S)
    store.start(order("bert"), 10)


def test_upload_that_the_disk_does_not_take_holds_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_databases(monkeypatch)
    with closing(JobFolder(tmp_path, UPLOAD_BYTES, DAY_S)) as folder:
        store = UploadStore(folder)
        with full_disk(opened[0]), pytest.raises(NotStored):
            store.start(order(), 0)
        upload = store.start(order("bert"), 0)
        assert folder.usage.bytes == UPLOAD_BYTES
        assert [path.name for path in (tmp_path / "scans").iterdir()] == [upload.id]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Let the system write parts of what does not fit, as a full disk does."""
    with limited_files(size):
        yield


def test_part_that_the_disk_does_not_take_whole_leaves_nothing(store: UploadStore) -> None:
    upload = add(store, store.start(order(), len(FILE)), FILE[:50])
    with no_file_longer_than(100), pytest.raises(NotStored):
        store.files.append(upload.id, 50, FILE[50:])
    assert store.look("anna", upload.id).offset == 50


def test_upload_that_goes_makes_room_on_a_disk_that_takes_nothing(
    store: UploadStore, folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, late = (add(store, store.start(order(), len(FILE)), FILE) for _ in range(2))
    written = (tmp_path / "jobs.sqlite-wal").stat().st_size
    with no_file_longer_than(written), pytest.raises(NotStored):
        store.discard(given_up)
    assert [path.name for path in (tmp_path / "scans").iterdir()] == [late.id]
    later = time.time() + DAY_S
    pass_time(monkeypatch, later)
    with no_file_longer_than(written), pytest.raises(NotStored):
        store.sweep()
    assert list((tmp_path / "scans").iterdir()) == []
    assert store.sweep() is None
    assert folder.usage.bytes == 0


def test_upload_of_another_is_unknown(store: UploadStore) -> None:
    upload = store.start(order(), 10)
    for owner, name in (("bert", upload.id), ("anna", "x")):
        with pytest.raises(UnknownJob):
            store.look(owner, name)


def test_upload_to_which_nothing_is_added_expires(
    store: UploadStore, jobs: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    old, new, job = (store.start(order(), len(FILE)) for _ in range(3))
    store.finish(add(store, job, FILE), None)
    pass_time(monkeypatch, now + DAY_S / 2)
    add(store, new, FILE[:10])
    pass_time(monkeypatch, now + DAY_S + 1)
    assert store.sweep() == pytest.approx(DAY_S / 2 - 1, abs=2)
    with pytest.raises(UnknownJob):
        store.look("anna", old.id)
    with pytest.raises(UnknownJob):
        store.append(old, b"x")
    assert store.look("anna", new.id).offset == 10
    assert jobs.find("anna", job.id).finished_s is None
    assert {path.name for path in (tmp_path / "scans").iterdir()} == {new.id, job.id}


def test_clock_that_is_set_back_keeps_no_upload_longer(
    store: UploadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    pass_time(monkeypatch, now + 30 * DAY_S)
    add(store, store.start(order(), len(FILE)), FILE[:10])
    pass_time(monkeypatch, now)
    assert store.sweep() == pytest.approx(DAY_S)
    pass_time(monkeypatch, now + DAY_S)
    assert store.sweep() is None
    assert list((tmp_path / "scans").iterdir()) == []


def test_upload_that_becomes_a_job_while_its_time_passes_stays(
    store: UploadStore, jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last request comes at the last moment that the sweep leaves to others."""
    now = time.time()
    upload = add(store, store.start(order(), len(FILE)), FILE)
    held = jobs.folder.usage.bytes
    pass_time(monkeypatch, now + DAY_S + 1)
    real = jobs.folder.transaction

    def transaction() -> AbstractContextManager[sqlite3.Connection]:
        monkeypatch.setattr(jobs.folder, "transaction", real)
        store.finish(upload, None)
        return real()

    monkeypatch.setattr(jobs.folder, "transaction", transaction)
    assert store.sweep() is None
    assert [job.id for job in jobs.list_jobs("anna")] == [upload.id]
    assert jobs.folder.usage.bytes == held
    assert store.files.size(upload.id) == len(FILE)


def test_upload_that_is_removed_before_it_becomes_a_job_is_unknown(
    store: UploadStore, jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    upload = add(store, store.start(order(), len(FILE)), FILE)
    pass_time(monkeypatch, now + DAY_S + 1)
    store.sweep()
    with pytest.raises(UnknownJob, match="that has not expired"):
        store.finish(upload, None)
    assert (jobs.folder.usage.bytes, jobs.folder.usage.queued) == (0, 0)


def test_upload_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    """Killed before any step: what is there of the file is its beginning, and it can go on."""
    seen: set[tuple[int, bool]] = set()
    for step in count():
        folder = tmp_path / str(step)

        def work(folder: Path = folder) -> None:
            store = UploadStore(JobFolder(folder, ENOUGH, DAY_S))
            upload = store.start(order(), len(FILE))
            (folder.parent / f"{folder.name} started").write_text(upload.id)
            for part in (FILE[:70], FILE[70:150], FILE[150:]):
                upload = add(store, upload, part)
                store.files.sync(upload.id)
            store.finish(upload, None)

        killed = killed_at(step, work)
        started = tmp_path / f"{step} started"
        if started.exists() and (name := started.read_text()):
            with closing(JobFolder(folder, ENOUGH, DAY_S)) as opened:
                store, jobs = UploadStore(opened), JobStore(opened)
                found = store.look("anna", name)
                seen.add((found.offset, found.accepted))
                if not found.accepted:
                    store.finish(add(store, found, FILE[found.offset :]), None)
                claim = jobs.claim([MODEL])
                assert claim is not None
                assert bytes(jobs.folder.files.open(claim.job, claim.entry, 0)) == FILE
                assert jobs.claim([MODEL]) is None
                assert jobs.folder.usage.bytes == len(FILE) + UPLOAD_BYTES
        if not killed:
            break
    assert seen >= {(0, False), (70, False), (150, False), (200, False), (200, True)}
