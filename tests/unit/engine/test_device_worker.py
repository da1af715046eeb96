"""A device that is given a batch before the one before is collected."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from app.compute.device import HOST, NamedDevice
from app.engine.active_scans import DetectRequest, Progress
from app.engine.device_loop import DeviceLoop
from app.engine.device_worker import MAX_CONSECUTIVE_OOM
from app.engine.metrics import Metrics
from app.errors import InsufficientMemory
from app.inference.detector import Detection, Detector
from app.model.loader import load_module
from app.model.registry import LoadedModel
from tests.support.device_loops import (
    FAR,
    ask,
    assert_same_landmarks,
    running,
    scan,
    until,
    wait_for,
    with_network,
)
from tests.support.model_folders import make_model_folder

SMALL = (20, 20, 20)
LARGE = (40, 44, 90)
ASYNCHRONOUS = replace(HOST, asynchronous=True)


class Stepped(nn.Module):
    """A network whose passes are released one by one; some of them run out of memory."""

    def __init__(self, inner: nn.Module, out_of_memory: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.inner = inner
        self.release = [threading.Event() for _ in range(9)]
        self.begun = [threading.Event() for _ in range(9)]
        self.tiles: list[int] = []
        self.out_of_memory = out_of_memory

    def forward(self, tiles: Tensor) -> Tensor:
        number = len(self.tiles)
        self.tiles.append(len(tiles))
        self.begun[number].set()
        assert self.release[number].wait(timeout=30)
        if number in self.out_of_memory:
            raise torch.OutOfMemoryError("out of memory")
        output: Tensor = self.inner(tiles)
        return output


async def begin(loop: DeviceLoop, model: LoadedModel) -> "asyncio.Task[Detection]":
    """Ask for the landmarks of a small scan, and wait until it is prepared."""
    prepared = asyncio.Event()

    def note(progress: Progress) -> None:
        if progress.tiles and not progress.tile:
            prepared.set()

    request = DetectRequest(model, scan(2, SMALL), FAR, on_progress=note)
    asked = asyncio.create_task(loop.run(request))
    await prepared.wait()
    return asked


@pytest.fixture
def inner(model: LoadedModel, tmp_path: Path) -> nn.Module:
    return load_module(make_model_folder(tmp_path), model.manifest)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_next_batch_is_launched_before_the_last_is_collected(
    model: LoadedModel, inner: nn.Module, asynchronous: bool
) -> None:
    network = Stepped(inner)
    stepped = with_network(model, network)

    async def scenario() -> None:
        async with running(batch_size=1, device=replace(HOST, asynchronous=asynchronous)) as loop:
            first = asyncio.create_task(ask(loop, stepped, scan(1, SMALL)))
            await wait_for(network.begun[0])
            second = await begin(loop, stepped)
            network.release[0].set()
            await wait_for(network.begun[1])
            await asyncio.wait([first], timeout=0.5 if asynchronous else 10)
            assert first.done() is not asynchronous
            network.release[1].set()
            for seed, task in ((1, first), (2, second)):
                assert_same_landmarks(
                    await task, Detector(with_network(model, inner)).detect(scan(seed, SMALL))
                )

    asyncio.run(scenario())


def test_batch_that_runs_out_of_memory_beside_another_is_run_again_alone(
    model: LoadedModel, inner: nn.Module
) -> None:
    """It was not too large by itself, so the batch size stays."""
    network = Stepped(inner, out_of_memory=frozenset({1}))
    stepped = with_network(model, network)

    async def scenario() -> None:
        async with running(batch_size=4, device=ASYNCHRONOUS) as loop:
            first = asyncio.create_task(ask(loop, stepped, scan(1, SMALL)))
            await wait_for(network.begun[0])
            others = [asyncio.create_task(ask(loop, stepped, scan(n, SMALL))) for n in (2, 3)]
            await until(lambda: loop.queue.waiting_tiles == 2 and not loop.queue.unprepared)
            for event in network.release:
                event.set()
            await asyncio.gather(first, *others)
            assert network.tiles == [1, 2, 2]
            assert loop.sizes.size(Detector(stepped).prepare(scan(1, SMALL)).lane) == 4

    asyncio.run(scenario())


def test_scan_that_fails_in_one_batch_is_not_settled_again_by_the_next(
    model: LoadedModel, inner: nn.Module
) -> None:
    """Its other tiles may be on the device already."""
    network = Stepped(inner, out_of_memory=frozenset({0}))
    stepped = with_network(model, network)
    for event in network.release:
        event.set()

    async def scenario() -> None:
        async with running(batch_size=1, device=ASYNCHRONOUS) as loop:
            with pytest.raises(Exception, match="expected"):
                await ask(loop, stepped, scan(1, (30, 33, 70)))
            found = await ask(loop, stepped, scan(2, SMALL))
            assert_same_landmarks(
                found, Detector(with_network(model, inner)).detect(scan(2, SMALL))
            )

    asyncio.run(scenario())


def test_scans_too_large_to_be_prepared_do_not_make_the_device_unhealthy(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run_out(*_: object) -> None:
        raise MemoryError

    async def scenario() -> None:
        async with running(batch_size=1) as loop:
            with monkeypatch.context() as patch:
                patch.setattr("app.inference.detector.make_grid", run_out)
                for seed in range(2 * MAX_CONSECUTIVE_OOM):
                    with pytest.raises(InsufficientMemory):
                        await ask(loop, model, scan(seed, SMALL))
            # The device's thread is done with everything before it answers this.
            await asyncio.wrap_future(loop.queue.submit(int))
            assert "device unhealthy" not in caplog.messages
            await ask(loop, model, scan(1, SMALL))

    asyncio.run(scenario())


class Held(nn.Module):
    """A network whose first pass waits before its first layer and after its last one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.begun, self.go_on, self.end = (threading.Event() for _ in range(3))

    def forward(self, tiles: Tensor) -> Tensor:
        is_first = not self.begun.is_set()
        if is_first:
            self.begun.set()
            assert self.go_on.wait(timeout=30)
        output: Tensor = self.inner(tiles)
        assert not is_first or self.end.wait(timeout=30)
        return output


@pytest.fixture
def network(inner: nn.Module) -> Held:
    return Held(inner)


@pytest.fixture
def held(model: LoadedModel, network: Held) -> LoadedModel:
    return with_network(model, network)


@asynccontextmanager
async def amid_pass(
    held: LoadedModel, network: Held, device: NamedDevice = HOST
) -> AsyncIterator[tuple[DeviceLoop, asyncio.Task[Detection]]]:
    """Run a device loop that has begun a pass over a large scan."""
    async with running(batch_size=1, device=device) as loop:
        large = asyncio.create_task(ask(loop, held, scan(1, LARGE)))
        await wait_for(network.begun)
        yield loop, large


def test_small_scan_is_answered_in_the_middle_of_a_pass_over_a_large_one(
    model: LoadedModel, inner: nn.Module, held: LoadedModel, network: Held
) -> None:
    """Both answers are those that the scans have alone, to the last bit; times are their own."""

    async def scenario() -> None:
        async with amid_pass(held, network) as (loop, large):
            small = await begin(loop, held)
            network.go_on.set()
            async with asyncio.timeout(30):
                second = await small
            assert not large.done()
            network.end.set()
            first = await large
        for seed, shape, found in ((1, LARGE, first), (2, SMALL, second)):
            alone = Detector(with_network(model, inner)).detect(scan(seed, shape))
            assert repr(found.landmarks) == repr(alone.landmarks)

    asyncio.run(scenario())


def test_fault_of_a_pass_within_another_ends_the_thread_and_leaves_nobody_waiting(
    held: LoadedModel, network: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("as of a defect")

    async def scenario() -> None:
        async with amid_pass(held, network) as (loop, large):
            monkeypatch.setattr(Metrics, "observe_wait", fail)
            small = await begin(loop, held)
            network.go_on.set()
            async with asyncio.timeout(20):
                answers = await asyncio.gather(small, large, return_exceptions=True)
            assert ["thread ended; try again" in str(one) for one in answers] == [True, True]
            network.end.set()

    asyncio.run(scenario())


def test_pass_over_a_large_scan_ends_with_its_last_client(held: LoadedModel, network: Held) -> None:
    """And is no fault of the same scan, asked for again meanwhile."""

    async def scenario() -> None:
        async with amid_pass(held, network) as (loop, large):
            large.cancel()
            await asyncio.wait([large])
            again = asyncio.create_task(ask(loop, held, scan(1, LARGE)))
            await asyncio.sleep(0)
            network.go_on.set()
            async with asyncio.timeout(20):  # The first pass would wait longer for its end.
                await again

    asyncio.run(scenario())


def test_device_that_runs_beside_the_host_is_not_interrupted(
    held: LoadedModel, network: Held
) -> None:
    async def scenario() -> None:
        async with amid_pass(held, network, ASYNCHRONOUS) as (loop, large):
            small = asyncio.create_task(ask(loop, held, scan(2, SMALL)))
            network.go_on.set()
            await asyncio.wait([small], timeout=0.5)
            assert not small.done()
            network.end.set()
            await asyncio.gather(large, small)

    asyncio.run(scenario())


class Counted(nn.Module):
    """A network that counts its threads, in passes that begin together."""

    def __init__(self, inner: nn.Module, together: int) -> None:
        super().__init__()
        self.inner = inner
        self.together = threading.Barrier(together)
        self.threads: list[int] = []
        self.now = self.most = 0

    def forward(self, tiles: Tensor) -> Tensor:
        self.now += 1
        self.most = max(self.most, self.now)
        self.together.wait(30)
        output: Tensor = self.inner(tiles)
        self.threads.append(torch.get_num_threads())
        self.now -= 1
        return output


SIDE_BY_SIDE = replace(HOST, passes=2)


@pytest.mark.usefixtures("two_threads")
def test_two_scans_run_side_by_side_with_half_the_cores_each(
    model: LoadedModel, inner: nn.Module
) -> None:
    """Each waits in its pass for the other one; the answers are those that they have alone."""
    network = Counted(inner, together=2)
    counted = with_network(model, network)

    async def scenario() -> list[Detection]:
        async with running(batch_size=1, device=SIDE_BY_SIDE) as loop, asyncio.timeout(30):
            return await asyncio.gather(*(ask(loop, counted, scan(n, SMALL)) for n in (1, 2)))

    for seed, found in zip((1, 2), asyncio.run(scenario()), strict=True):
        alone = Detector(with_network(model, inner)).detect(scan(seed, SMALL))
        assert repr(found.landmarks) == repr(alone.landmarks)
    assert network.threads[0] == 1


@pytest.mark.usefixtures("two_threads")
def test_tiles_of_one_scan_run_one_after_the_other_with_all_cores(
    model: LoadedModel, inner: nn.Module
) -> None:
    network = Counted(inner, together=1)

    async def scenario() -> None:
        async with running(batch_size=1, device=SIDE_BY_SIDE) as loop:
            await ask(loop, with_network(model, network), scan(1))

    asyncio.run(scenario())
    assert len(network.threads) > 1
    assert set(network.threads) == {2}
    assert network.most == 1


@pytest.mark.usefixtures("two_threads")
def test_pass_that_hangs_leaves_room_to_others(model: LoadedModel, inner: nn.Module) -> None:
    network = Held(inner)
    held = with_network(model, network)

    async def scenario() -> None:
        async with running(batch_size=1, device=SIDE_BY_SIDE) as loop, asyncio.timeout(30):
            hanging = asyncio.create_task(ask(loop, held, scan(1, SMALL)))
            await wait_for(network.begun)
            for seed in (2, 3):
                await ask(loop, held, scan(seed, SMALL))
            assert not hanging.done()
            network.go_on.set()
            network.end.set()
            await hanging

    asyncio.run(scenario())


class Beside(nn.Module):
    """A network whose large tile waits for the small one, and that for all cores."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.large_begun, self.small_begun = threading.Event(), threading.Event()
        self.ended: list[str] = []

    def forward(self, tiles: Tensor) -> Tensor:
        if not self.large_begun.is_set():
            self.large_begun.set()
            assert self.small_begun.wait(30)
            output: Tensor = self.inner(tiles)
            self.ended.append("large")
            return output
        self.small_begun.set()
        end_s = time.monotonic() + 20
        while True:
            output = self.inner(tiles)
            if torch.get_num_threads() == 2 or time.monotonic() > end_s:
                self.ended.append("small")
                return output


@pytest.mark.usefixtures("two_threads")
def test_pass_over_a_large_scan_leaves_all_cores_to_a_small_one_beside_it(
    model: LoadedModel, inner: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.device_worker.FIRST_TURN_S", 20.0)
    network = Beside(inner)
    beside = with_network(model, network)

    async def scenario() -> None:
        async with running(batch_size=1, device=SIDE_BY_SIDE) as loop, asyncio.timeout(60):
            small = scan(2, SMALL)
            loop.sizes.observe(Detector(beside).prepare(small).lane, 1, 20.0)
            large = asyncio.create_task(ask(loop, beside, scan(1, (40, 44, 90))))
            await wait_for(network.large_begun)
            await ask(loop, beside, small)
            await large

    asyncio.run(scenario())
    assert network.ended[0] == "small"
