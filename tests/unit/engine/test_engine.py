"""The engine's states: loading, running, draining."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from app.compute import device
from app.engine import engine as engine_module
from app.engine.engine import Engine
from app.engine.metrics import Metrics
from app.errors import ModelRefused, NotReady
from app.inference import detector
from app.inference.load import load_checked
from app.model import LoadedModel
from app.preprocessing import Grid, make_grid
from tests.support.device_loops import until, wait_for
from tests.support.dicom_files import crowded, zipped
from tests.support.model_folders import make_model_folder
from tests.support.services import MODEL, toy_models, toy_scan, toy_settings


@pytest.mark.parametrize("others", [0, 1], ids=["while the last loads", "with more to load"])
def test_engine_that_is_stopped_while_models_load_stays_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """The stop was asked for, so that a model which is refused by it is no failure."""
    models = toy_models(tmp_path)
    for number in range(others):
        make_model_folder(models, f"toy{number}")
    loading, finish_loading = threading.Event(), threading.Event()

    def load_slowly(folder: Path, device: torch.device, **options: Any) -> LoadedModel:
        loading.set()
        assert finish_loading.wait(timeout=30)
        return load_checked(folder, device, **options)

    monkeypatch.setattr(engine_module, "load_checked", load_slowly)

    async def scenario() -> None:
        engine = Engine(toy_settings(models), Metrics())
        starting = asyncio.create_task(engine.start())
        await wait_for(loading)
        engine.close()
        stopping = asyncio.create_task(engine.stop())
        # Its queue is closed while the thread still loads, and refuses the next model.
        await until(lambda: engine.devices.loops[0].queue.submit(int).done())
        finish_loading.set()
        await starting
        assert engine.readiness().reason == "the service is stopping"
        await stopping

    asyncio.run(scenario())


def test_passes_use_no_more_threads_than_a_limit_has_the_time_of_cores_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = torch.get_num_threads()
    monkeypatch.setattr(device, "CGROUPS", str(tmp_path))
    (tmp_path / "cpu.max").write_text("130000 100000\n")
    (tmp_path / "groups").write_text("0::/\n")
    monkeypatch.setattr(device, "OWN_GROUPS", str(tmp_path / "groups"))
    models = toy_models(tmp_path)
    try:
        torch.set_num_threads(8)
        Engine(toy_settings(models, threads=0), Metrics())
        assert torch.get_num_threads() == 2
        Engine(toy_settings(models, threads=3), Metrics())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(chosen)


class Gate:
    """Holds whoever loads a model, before anything is read."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.loads = 0

    def load(self, folder: Path, device: torch.device, **options: Any) -> LoadedModel:
        """Load a model once the gate is open."""
        self.loads += 1
        self.entered.set()
        assert self.open.wait(timeout=30)
        return load_checked(folder, device, **options)

    async def hold(self, engine: Engine) -> "asyncio.Task[None]":
        """Begin a reload, and hold it."""
        self.entered.clear()
        self.open.clear()
        reload = asyncio.create_task(engine.reload(MODEL))
        await wait_for(self.entered)
        return reload


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(engine_module, "load_checked", gate.load)
    return gate


def version_of(engine: Engine) -> str:
    return engine.registry.get(MODEL).manifest.version


def test_scans_are_answered_while_a_model_is_read_and_built(tmp_path: Path, gate: Gate) -> None:
    async def scenario() -> None:
        engine = Engine(toy_settings(toy_models(tmp_path)), Metrics())
        await engine.start()
        reload = await gate.hold(engine)
        old = engine.registry.get()
        answer = await engine.detect(toy_scan(), old, timeout_s=30)
        assert len(answer.landmarks) == len(old.manifest.landmarks)
        assert not reload.done()
        gate.open.set()
        await reload
        assert engine.registry.get() is not old
        await engine.stop()

    asyncio.run(scenario())


def test_reloads_of_a_model_share_the_next_load_and_none_that_has_begun(
    tmp_path: Path, gate: Gate
) -> None:
    models = toy_models(tmp_path)

    async def scenario() -> None:
        engine = Engine(toy_settings(models), Metrics())
        await engine.start()
        first = await gate.hold(engine)
        before = gate.loads
        file = models / MODEL / "model.toml"
        file.write_text(file.read_text().replace('"1.0.0"', '"1.1.0"'))
        others = [asyncio.create_task(engine.reload(MODEL)) for _ in range(19)]
        await asyncio.sleep(0)
        others.pop().cancel()
        gate.open.set()
        await asyncio.gather(first, *others)
        assert gate.loads == before + 1
        assert version_of(engine) == "1.1.0"
        await engine.reload(MODEL)
        assert gate.loads == before + 2
        await engine.stop()

    asyncio.run(scenario())


def test_all_who_share_a_load_are_told_that_the_folder_is_refused(
    tmp_path: Path, gate: Gate
) -> None:
    models = toy_models(tmp_path)

    async def scenario() -> None:
        engine = Engine(toy_settings(models), Metrics())
        await engine.start()
        (models / MODEL / "weights.safetensors").write_bytes(b"half")
        reloads = [engine.reload(MODEL) for _ in range(3)]
        outcomes = await asyncio.gather(*reloads, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ModelRefused] * 3
        assert gate.loads == 2
        await engine.stop()

    asyncio.run(scenario())


def test_a_device_is_checked_without_the_folders_of_the_models(tmp_path: Path) -> None:
    """A half-copied update must not keep a sound device out."""
    models = toy_models(tmp_path)

    async def scenario() -> None:
        engine = Engine(toy_settings(models), Metrics())
        await engine.start()
        for file in (models / MODEL).iterdir():
            file.write_bytes(b"half")
        loop = engine.devices.loops[0]

        def die() -> None:
            raise SystemExit

        with pytest.raises(NotReady):
            await asyncio.wrap_future(loop.queue.submit(die))
        await until(lambda: loop.unhealthy_reason is not None)
        await until(lambda: loop.lost or loop.unhealthy_reason is None)
        assert not loop.lost
        answer = await engine.detect(toy_scan(), engine.registry.get(), timeout_s=30)
        assert answer.landmarks
        await engine.stop()

    asyncio.run(scenario())


def test_archives_of_one_client_leave_a_thread_to_the_scan_of_another(tmp_path: Path) -> None:
    """Each of them takes seconds, in which nothing is found."""
    archive = zipped([crowded(900_000)])

    async def scenario() -> None:
        engine = Engine(toy_settings(toy_models(tmp_path)), Metrics())
        await engine.start()
        find = partial(engine.detect, model=engine.registry.get(MODEL), timeout_s=300)
        many = [asyncio.create_task(find(archive, client="anna")) for _ in range(3)]
        scan = asyncio.create_task(find(toy_scan(), client="bert"))
        first, _ = await asyncio.wait((scan, *many), return_when=asyncio.FIRST_COMPLETED)
        for task in many:
            task.cancel()
        await asyncio.gather(scan, *many, return_exceptions=True)
        await engine.stop()
        assert first == {scan}
        assert scan.result().landmarks

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_memory_of_a_scan_is_held_until_no_thread_prepares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it any more; preparing a large one takes seconds, and each its memory."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def prepare(*arguments: Any) -> Grid:
        begun.release()
        assert go_on.wait(30)
        return make_grid(*arguments)

    async def scenario() -> None:
        engine = Engine(toy_settings(toy_models(tmp_path)), Metrics())
        await engine.start()
        monkeypatch.setattr(detector, "make_grid", prepare)
        needs = engine.precheck(toy_scan(), engine.registry.get(MODEL), timeout_s=30)
        assert needs is not None
        engine.memory.limit = engine.memory.share = int(1.2 * needs.memory)
        find = partial(engine.detect, model=engine.registry.get(MODEL), timeout_s=30)
        first = asyncio.create_task(find(toy_scan()))
        assert await asyncio.to_thread(begun.acquire, timeout=30)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        del first  # Its error has the frames that hold the scan.
        second = asyncio.create_task(find(toy_scan()))
        assert not await asyncio.to_thread(begun.acquire, timeout=0.5)
        assert engine.memory.used == needs.memory
        go_on.set()
        assert (await second).landmarks
        assert engine.memory.used == 0
        await engine.stop()

    asyncio.run(scenario())


def test_work_of_one_client_leaves_a_thread_to_that_of_another(tmp_path: Path) -> None:
    """To convert the largest scans takes many seconds each, a corrected answer a hundredth."""
    go_on = threading.Event()

    async def scenario() -> None:
        engine = Engine(toy_settings(toy_models(tmp_path)), Metrics())

        async def work(client: str, convert: Callable[[], bool]) -> bool:
            with engine.admission.admit(client) as admitted:
                return await engine.compute(lambda _: convert(), admitted=admitted, memory=1)

        many = [asyncio.create_task(work("anna", lambda: go_on.wait(30))) for _ in range(9)]
        assert await asyncio.wait_for(work("bert", lambda: not go_on.is_set()), 30)
        go_on.set()
        assert all(await asyncio.gather(*many))
        await engine.stop()

    asyncio.run(scenario())


def test_memory_of_work_is_held_until_no_thread_does_it(tmp_path: Path) -> None:
    """Whoever sends arrays of votes and leaves has them read on; it was given to others at once."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def work(_: object) -> None:
        begun.release()
        assert go_on.wait(30)

    async def scenario() -> None:
        engine = Engine(toy_settings(toy_models(tmp_path)), Metrics())
        most = engine.memory.limit // 2 + 1

        async def ask(client: str) -> None:
            with engine.admission.admit(client) as admitted:
                await engine.compute(work, admitted=admitted, memory=most, timeout_s=30)

        first = asyncio.create_task(ask("a"))
        assert await asyncio.to_thread(begun.acquire, timeout=30)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        del first  # Its error has the frames that hold the work.
        second = asyncio.create_task(ask("b"))
        assert not await asyncio.to_thread(begun.acquire, timeout=0.5)
        assert engine.memory.used == most
        go_on.set()
        await second
        assert engine.memory.used == 0
        await engine.stop()

    asyncio.run(scenario())
