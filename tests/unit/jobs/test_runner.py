"""The runner of jobs: what is kept of its work if the service is stopped in the middle of it."""

import asyncio
import gc
import logging
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.api.problems import describe_problem
from app.engine import Engine, Metrics
from app.errors import NotAVolume, NotStored, UnknownModel
from app.inference import Detection
from app.io import ReadinessAnswer
from app.jobs import JobFolder, JobRunner
from app.jobs.files import not_stored
from app.jobs.records import Claim, KeptJob, State
from app.jobs.runner import MAX_ATTEMPTS
from app.jobs.store import JobStore
from app.model import Registry
from app.settings import Settings
from tests.support.dicom_files import zipped
from tests.unit.jobs import DAY_S, ENOUGH, MODEL, opened_databases, order

PATIENCE_S = 30.0


class Refusing(Engine):
    """An engine that refuses every scan, once it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Settings(models_dir=folder, device="cpu"), Metrics())
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    def readiness(self) -> ReadinessAnswer:
        return ReadinessAnswer(ready=True, reason="ready", models={})

    async def detect(self, *_: object, **__: object) -> Detection:
        self.asked.set()
        await self.may_answer.wait()
        raise NotAVolume("expected a scan, got another file")


@pytest.fixture(autouse=True)
def _any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "get", lambda *_: None)
    monkeypatch.setattr(Registry, "names", frozenset({MODEL}))


async def steps() -> None:
    """Let what is ready on the event loop go on until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Modelless(Refusing):
    """An engine none of whose models could be loaded."""

    def readiness(self) -> ReadinessAnswer:
        return ReadinessAnswer(ready=False, reason="no usable model", models={})


def mapped_files() -> str:
    """List the files that this process has mapped, of what is still in use."""
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await steps()


def started(
    path: Path, kind: type[Refusing] = Refusing, ttl_s: float = DAY_S
) -> tuple[Refusing, JobRunner, "asyncio.Task[None]"]:
    engine = kind(path)
    runner = JobRunner(JobFolder(path, ENOUGH, ttl_s), engine, Metrics(), describe_problem)
    return engine, runner, asyncio.create_task(runner.run())


async def stopped(runner: JobRunner, running: "asyncio.Task[None]", held: threading.Event) -> None:
    """Stop a runner whose thread is held until it has been told to stop."""
    running.cancel()
    await steps()
    held.set()
    await asyncio.wait((running,))
    assert running.cancelled()
    await runner.close()


def test_outcome_that_waits_to_be_kept_is_kept_before_a_stop(tmp_path: Path) -> None:
    held = threading.Event()

    async def scenario() -> str:
        engine, runner, running = started(tmp_path)
        accept = partial(runner.store.accept, order(), b"scan", None)
        job = await runner.accept("anna", accept)
        await engine.asked.wait()
        call = asyncio.create_task(runner.call("bert", partial(held.wait, PATIENCE_S)))
        await steps()
        engine.may_answer.set()
        await steps()
        assert not runner.progress()  # It has run, and what is to be kept waits for the thread.
        await stopped(runner, running, held)
        await call
        return job

    job = asyncio.run(scenario())
    folder = JobFolder(tmp_path, ENOUGH, DAY_S)
    assert JobStore(folder).find("anna", job).counts == {"failed": 1}
    folder.close()


def test_scan_that_is_claimed_during_a_stop_counts_as_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed, held = threading.Event(), threading.Event()

    async def scenario() -> None:
        engine, runner, running = started(tmp_path)
        runner.store.accept(order(), b"scan", None)  # The task has not begun.
        claim = runner.store.claim

        def claim_slowly(*values: Any, **options: Any) -> Claim | None:
            found = claim(*values, **options)
            if found is not None:
                claimed.set()
                held.wait(PATIENCE_S)
            return found

        monkeypatch.setattr(runner.store, "claim", claim_slowly)
        assert await asyncio.to_thread(claimed.wait, PATIENCE_S)
        await stopped(runner, running, held)
        assert not engine.asked.is_set()

    asyncio.run(scenario())
    folder = JobFolder(tmp_path, ENOUGH, DAY_S)
    assert JobStore(folder).claim([MODEL], suspect=True) is None
    assert JobStore(folder).claim([MODEL]) is not None
    folder.close()


def test_scan_whose_model_goes_once_it_was_chosen_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()

    def get_none(*_: object) -> None:
        raise UnknownModel("expected a model, got one that a reload has replaced")

    async def scenario() -> None:
        _, runner, running = started(tmp_path)
        claim = runner.store.claim

        def claim_and_lose(*values: Any, **options: Any) -> Claim | None:
            found = claim(*values, **options)
            if found is not None:
                monkeypatch.setattr(Registry, "get", get_none)
                monkeypatch.setattr(Registry, "names", frozenset())
                lost.set()
            return found

        monkeypatch.setattr(runner.store, "claim", claim_and_lose)
        job = await runner.accept("anna", partial(runner.store.accept, order(), b"scan", None))

        def counts() -> dict[State, int]:
            return runner.store.find("anna", job).counts

        await until(lambda: lost.is_set() and counts() != {"running": 1})
        assert counts() == {"queued": 1}
        again = claim({MODEL})
        assert again is not None
        assert again.attempts == 1
        await stopped(runner, running, lost)

    asyncio.run(scenario())


def test_job_that_was_kept_before_its_acceptance_failed_is_run(tmp_path: Path) -> None:
    """As where the disk takes it, and does not give it again to be described."""

    async def scenario() -> None:
        engine, runner, running = started(tmp_path)

        def keep() -> str:
            runner.store.accept(order(), b"scan", None)
            raise not_stored()

        await steps()  # By now the runner has found nothing to do.
        with pytest.raises(NotStored):
            await runner.accept("anna", keep)
        async with asyncio.timeout(PATIENCE_S):
            await engine.asked.wait()
        await stopped(runner, running, threading.Event())

    asyncio.run(scenario())


def test_owners_take_turns_however_many_scans_one_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="app.jobs")

    def ended() -> list[object]:
        records = [one for one in caplog.records if one.getMessage() == "scan of a job"]
        return [vars(one)["request_id"] for one in records]

    async def scenario() -> None:
        engine, runner, running = started(tmp_path)
        engine.may_answer.set()
        for owner in ("anna",) * 9 + ("bert",):  # The task has not begun.
            runner.store.accept(replace(order(owner), request_id=owner), b"scan", None)
        await until(lambda: len(ended()) == 10)
        await stopped(runner, running, threading.Event())

    asyncio.run(scenario())
    assert "bert" in ended()[:6]  # It is the third; others that run at once may end before it.


def test_job_after_one_that_was_removed_while_it_ran_is_run_as_any(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine, runner, running = started(tmp_path)
        accept = partial(runner.store.accept, order(), b"scan", None)
        removed = await runner.accept("anna", accept)
        await engine.asked.wait()
        engine.asked.clear()
        await runner.call("anna", partial(runner.store.remove, "anna", removed))
        job = await runner.accept("anna", accept)
        await engine.asked.wait()
        runner.cancel(removed)
        engine.may_answer.set()
        async with asyncio.timeout(PATIENCE_S):
            while runner.progress():
                await steps()
        assert not running.done()
        find = partial(runner.store.find, "anna", job)
        assert (await runner.call("anna", find)).counts == {"failed": 1}
        await stopped(runner, running, threading.Event())

    asyncio.run(scenario())


def test_service_without_a_usable_model_removes_jobs_in_time_and_says_which_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It kept patients' answers for as long as a scan waited for its model, and told nobody."""
    folder = JobFolder(tmp_path, ENOUGH, DAY_S)
    store = JobStore(folder)
    store.accept(order(), b"scan", None)
    claim = store.claim([MODEL])
    assert claim is not None
    store.settle(claim, "done", "{}")
    waiting = store.accept(order(), b"scan", None)
    jobs = {job.id: job for job in store.list_jobs("anna")}
    folder.close()
    monkeypatch.setattr(Registry, "names", frozenset())

    async def scenario() -> None:
        engine, runner, running = started(tmp_path, Modelless, ttl_s=0)
        await until(lambda: [job.id for job in runner.store.list_jobs("anna")] == [waiting])
        assert "jobs wait" not in caplog.text  # Models are being loaded.
        assert runner.why_waits(jobs[waiting]) == "no usable model"
        assert runner.why_waits(jobs[claim.job]) is None
        engine.loaded.set()
        await until(lambda: "jobs wait for a model that is not loaded" in caplog.text)
        await stopped(runner, running, threading.Event())

    asyncio.run(scenario())


def test_scans_the_disk_has_no_room_for_say_so_and_hold_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them held up the jobs of all, and gave no reason."""
    usage, free = shutil.disk_usage(tmp_path), 50
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    large = [bytes(range(60 + number)) for number in range(4)]

    async def scenario() -> None:
        nonlocal free
        engine, runner, running = started(tmp_path)
        engine.may_answer.set()

        async def settled(owner: str, job: str, count: int) -> KeptJob:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    found = await runner.call(owner, partial(runner.store.find, owner, job))
                    if found.counts.get("failed") == count:
                        return found

        accept = partial(runner.store.accept, order(), zipped([*large, b"scan"]), 5)
        archive = await runner.accept("anna", accept)
        accept = partial(runner.store.accept, replace(order(), owner="bert"), b"scan", None)
        other = await settled("bert", await runner.accept("bert", accept), 1)
        assert runner.why_waits(other) is None
        waiting = await settled("anna", archive, 1)
        await until(lambda: len(runner._aside) == 4)  # noqa: SLF001 - nothing else waits now
        assert re.fullmatch(  # Any of the four may have been the first.
            "expected a disk with room for the 6[0-3] bytes of a scan of the archive, got one with "
            "50; it is tried again",
            runner.why_waits(waiting) or "",
        )
        assert archive not in mapped_files()  # Removed, it gives its room back.
        for _ in range(MAX_ATTEMPTS):
            runner._take_back()  # noqa: SLF001 - as after a minute
            await until(lambda: len(runner._aside) == 4)  # noqa: SLF001
        free = 100
        runner._take_back()  # noqa: SLF001
        done = await settled("anna", archive, 5)
        assert runner.why_waits(done) is None
        await stopped(runner, running, threading.Event())

    asyncio.run(scenario())


def test_disk_that_takes_nothing_is_told_and_does_not_hold_up_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_databases(monkeypatch)

    async def scenario() -> None:
        engine, runner, running = started(tmp_path)
        accept = partial(runner.store.accept, order(), b"scan", None)
        job = runner.store.find("anna", await runner.accept("anna", accept))
        await engine.asked.wait()
        opened[0].execute("PRAGMA query_only = ON")
        engine.may_answer.set()
        await until(lambda: runner.why_waits(job) is not None)
        assert job.id not in mapped_files()  # The error of the scan holds it, and its memory.
        running.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait((running,))
        assert running.cancelled()
        await runner.close()

    asyncio.run(scenario())
    folder = JobFolder(tmp_path, ENOUGH, DAY_S)
    assert JobStore(folder).claim([MODEL], suspect=True) is not None
    folder.close()
