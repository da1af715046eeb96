"""The device loop: many requests, one device, and faults that hurt only the scan at fault."""

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from app.compute.device import NamedDevice
from app.engine import device_loop
from app.engine.active_scans import DetectRequest, Progress
from app.engine.batch_sizes import BatchSizes
from app.engine.device_loop import DeviceLoop
from app.engine.metrics import Metrics
from app.engine.work_queue import WorkQueue
from app.errors import DeadlineExceeded, InsufficientMemory, LandmarkdError, NetworkFailed, NotReady
from app.inference.detector import Detection, Detector, Located
from app.inference.scan_state import ScanState
from app.io.volume import Volume
from app.model.registry import LoadedModel
from tests.support.device_loops import (
    FAR,
    POISON,
    Faulty,
    ask,
    assert_same_landmarks,
    running,
    scan,
    until,
    wait_for,
    with_network,
)
from tests.support.memory import without_garbage_collection


def test_sharing_a_batch_changes_no_answer(where: NamedDevice, model: LoadedModel) -> None:
    detector = Detector(model)
    volumes = [scan(1), scan(2, (45, 20, 38)), scan(3, (12, 60, 90)), scan(4)]

    async def together() -> list[Detection]:
        async with running(batch_size=5, device=where) as loop:
            return await asyncio.gather(*[ask(loop, model, volume) for volume in volumes])

    for volume, detection in zip(volumes, asyncio.run(together()), strict=True):
        assert_same_landmarks(detection, detector.detect(volume))
        assert detection.volume.digest == volume.digest


def test_tiles_of_several_requests_share_a_batch(
    where: NamedDevice, model: LoadedModel, faulty: Faulty
) -> None:
    gated = with_network(model, faulty)

    async def scenario() -> None:
        async with running(batch_size=8, device=where) as loop:
            faulty.gate.clear()
            first = asyncio.create_task(ask(loop, gated, scan(1, (20, 20, 20))))
            await wait_for(faulty.entered)
            others = [asyncio.create_task(ask(loop, gated, scan(n))) for n in (2, 3)]
            await until(lambda: loop.load[1] == 3)
            faulty.gate.set()
            await asyncio.gather(first, *others)

    asyncio.run(scenario())
    assert min(faulty.batches) == 1
    assert sum(faulty.batches) == 1 + 2 * len(Detector(model).prepare(scan(2)).plan)


def test_one_bad_scan_fails_alone(where: NamedDevice, model: LoadedModel, faulty: Faulty) -> None:
    gated = with_network(model, faulty)
    good, bad = scan(1), scan(2, peak=2 * POISON)

    async def scenario() -> list[Detection | BaseException]:
        async with running(batch_size=6, device=where) as loop:
            return await asyncio.gather(
                *[ask(loop, gated, volume) for volume in (good, bad, good)],
                return_exceptions=True,
            )

    first, guilty, last = asyncio.run(scenario())
    assert isinstance(guilty, NetworkFailed)
    assert isinstance(first, Detection)
    assert isinstance(last, Detection)
    assert_same_landmarks(first, Detector(model).detect(good))
    assert_same_landmarks(first, last)


def test_votes_for_which_memory_runs_out_fail_their_own_scan_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(_: ScanState) -> None:
        raise torch.OutOfMemoryError("no memory for votes")

    monkeypatch.setattr("app.inference.detector.keep_votes", run_out)

    async def scenario() -> list[Detection | BaseException]:
        async with running(batch_size=2) as loop:
            drawn = loop.run(DetectRequest(model, scan(1), FAR, keeps_votes=True))
            others = [ask(loop, model, scan(seed)) for seed in (2, 3)]
            return await asyncio.gather(drawn, *others, return_exceptions=True)

    drawn, *others = asyncio.run(scenario())
    assert isinstance(drawn, InsufficientMemory)
    assert all(isinstance(other, Detection) for other in others)


def test_cancelled_request_leaves_its_batch_unharmed(
    where: NamedDevice, model: LoadedModel, faulty: Faulty
) -> None:
    gated = with_network(model, faulty)

    async def scenario() -> Detection:
        async with running(batch_size=4, device=where) as loop:
            faulty.gate.clear()
            stays = asyncio.create_task(ask(loop, gated, scan(1)))
            await wait_for(faulty.entered)
            leaves = asyncio.create_task(ask(loop, gated, scan(2)))
            await until(lambda: loop.load[1] == 2)
            leaves.cancel()
            faulty.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            detection = await stays
            assert loop.queue.unprepared == loop.queue.waiting_tiles == 0
            return detection

    assert_same_landmarks(asyncio.run(scenario()), Detector(model).detect(scan(1)))


def test_scan_that_cannot_be_prepared_fails_alone(where: NamedDevice, model: LoadedModel) -> None:
    broken = Volume(np.zeros((3, 4)), np.eye(4))

    async def scenario() -> tuple[BaseException | Detection, ...]:
        async with running(batch_size=2, device=where) as loop:
            requests = [ask(loop, model, volume) for volume in (broken, scan(1))]
            return tuple(await asyncio.gather(*requests, return_exceptions=True))

    guilty, fine = asyncio.run(scenario())
    assert isinstance(guilty, Exception)
    assert not isinstance(guilty, LandmarkdError)
    assert isinstance(fine, Detection)


@pytest.mark.parametrize(
    ("owner", "step", "error"),
    [
        (Detector, "prepare", SystemExit),
        (ScanState, "locate", SystemExit),
        (WorkQueue, "add_tiles", KeyError),
    ],
)
def test_thread_for_work_on_the_host_that_ends_fails_the_scans_and_the_device_goes_on(
    where: NamedDevice,
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    step: str,
    error: type[BaseException],
) -> None:
    """Whether the work itself ends it, or what follows it."""

    def end(*_: object) -> None:
        raise error

    async def scenario() -> Detection:
        async with running(batch_size=2, device=where) as loop:
            with monkeypatch.context() as broken:
                broken.setattr(owner, step, end)
                with pytest.raises(NotReady, match="thread ended"):
                    await ask(loop, model, scan(1))
            assert await asyncio.wrap_future(loop.queue.submit(lambda: 5)) == 5
            return await ask(loop, model, scan(1))

    assert_same_landmarks(asyncio.run(scenario()), Detector(model).detect(scan(1)))


def test_who_still_waits_gets_an_error_when_the_loop_stops_and_so_do_others_then(
    model: LoadedModel, faulty: Faulty
) -> None:
    gated = with_network(model, faulty)

    async def scenario() -> None:
        loop = DeviceLoop(BatchSizes(2), Metrics())
        loop.start()
        faulty.gate.clear()
        waiting = asyncio.create_task(ask(loop, gated, scan(1)))
        await wait_for(faulty.entered)
        stopping = asyncio.create_task(loop.stop())
        await asyncio.sleep(0)
        faulty.gate.set()
        with pytest.raises(NotReady):
            await waiting
        await stopping
        with pytest.raises(NotReady, match="it is stopping"):
            await ask(loop, gated, scan(2), deadline=asyncio.get_running_loop().time() + 5.0)

    asyncio.run(scenario())


def test_network_that_hangs_holds_up_a_stop_once(
    model: LoadedModel, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is stopped when it has drained, and again when the application ends."""

    async def scenario() -> None:
        loop = DeviceLoop(BatchSizes(1), Metrics())
        loop.start()
        faulty.gate.clear()
        waiting = asyncio.create_task(ask(loop, with_network(model, faulty), scan(1)))
        await wait_for(faulty.entered)
        monkeypatch.setattr(device_loop, "JOIN_S", 0.0)
        await loop.stop()
        monkeypatch.setattr(device_loop, "JOIN_S", FAR)
        async with asyncio.timeout(30):
            await loop.stop()
        with pytest.raises(NotReady):
            await waiting

    asyncio.run(scenario())


class RunsTwice(Detector):
    """A detector that has all tiles of a scan run once more before it answers."""

    def passes(self, volume: Volume) -> Iterator[ScanState | Located]:
        passes = super().passes(volume)
        state = next(passes)
        assert isinstance(state, ScanState)
        yield state
        state.votes, state.unmerged = [], 0
        yield state
        yield from passes


def test_another_pass_over_a_scan_is_queued_again(
    where: NamedDevice, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Progress] = []
    tiles = len(Detector(model).prepare(scan(1)).plan)
    monkeypatch.setattr("app.engine.device_loop.Detector", RunsTwice)

    async def scenario() -> Detection:
        async with running(batch_size=3, device=where) as loop:
            return await loop.run(DetectRequest(model, scan(1), FAR, on_progress=steps.append))

    start_s = time.perf_counter()
    detection = asyncio.run(scenario())
    # The wait for each pass counts once, however many batches it has.
    times = detection.timing
    assert 0 < times.queue < 1e3 * (time.perf_counter() - start_s) - times.busy_ms
    assert detection.tiles == 2 * tiles
    assert_same_landmarks(detection, Detector(model).detect(scan(1)))
    assert [step.tile for step in steps] == sorted(step.tile for step in steps)
    assert steps[-1].tiles == 2 * tiles


def test_scan_of_several_passes_counts_once_among_those_that_waited(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.device_loop.Detector", RunsTwice)
    metrics = Metrics()

    async def scenario() -> None:
        loop = DeviceLoop(BatchSizes(3), metrics)
        loop.start()
        await ask(loop, model, scan(1))
        await loop.stop()

    asyncio.run(scenario())
    lines = metrics.render().decode().splitlines()
    counts = [line for line in lines if line.startswith("landmarkd_wait_seconds_count")]
    assert [float(line.split()[-1]) for line in counts] == [1.0]


def test_late_request_fails_at_once_though_the_device_is_busy(
    where: NamedDevice, model: LoadedModel, faulty: Faulty
) -> None:
    gated = with_network(model, faulty)

    async def scenario() -> Detection:
        async with running(batch_size=2, device=where) as loop:
            faulty.gate.clear()
            patient = asyncio.create_task(ask(loop, gated, scan(1)))
            await wait_for(faulty.entered)
            soon = asyncio.get_running_loop().time() + 0.05
            # Nothing polls and the device is held, so only the timer can tell.
            with pytest.raises(DeadlineExceeded):
                await ask(loop, gated, scan(2), deadline=soon)
            faulty.gate.set()
            detection = await patient
            assert loop.queue.unprepared == loop.queue.waiting_tiles == 0
            return detection

    assert_same_landmarks(asyncio.run(scenario()), Detector(model).detect(scan(1)))


def test_request_whose_tiles_are_all_running_can_be_late_as_well(
    where: NamedDevice, model: LoadedModel, faulty: Faulty
) -> None:
    gated = with_network(model, faulty)

    async def scenario() -> None:
        async with running(batch_size=64, device=where) as loop:
            faulty.gate.clear()
            soon = asyncio.get_running_loop().time() + 0.05
            with pytest.raises(DeadlineExceeded):
                await ask(loop, gated, scan(1), deadline=soon)
            faulty.gate.set()

    asyncio.run(scenario())


def test_calls_run_on_the_one_thread_that_owns_the_device(
    where: NamedDevice, model: LoadedModel
) -> None:
    del model

    def fail() -> None:
        raise ValueError("no")

    async def scenario() -> None:
        async with running(batch_size=1, device=where) as loop:
            asked = [loop.queue.submit(lambda: threading.current_thread().name) for _ in range(3)]
            names = {await asyncio.wrap_future(answer) for answer in asked}
            assert names == {"cpu"}
            with pytest.raises(ValueError, match="no"):
                await asyncio.wrap_future(loop.queue.submit(fail))

    asyncio.run(scenario())


def test_answered_scan_is_freed_before_another_comes(
    where: NamedDevice, model: LoadedModel
) -> None:
    gone = threading.Event()

    def watched() -> Volume:
        volume = scan(1)
        weakref.finalize(volume.voxels, gone.set)
        return volume

    async def scenario() -> None:
        async with running(batch_size=1, device=where) as loop:
            await ask(loop, model, watched())
            assert await asyncio.to_thread(gone.wait, 10)

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", ["abandoned", "late", "failed"])
def test_scan_without_an_answer_is_freed_without_garbage_collection(
    where: NamedDevice, model: LoadedModel, faulty: Faulty, ends: str
) -> None:
    """Its memory is given to others as soon as it has ended; the collector may come much later."""
    gated, gone = with_network(model, faulty), threading.Event()

    def watched() -> Volume:
        volume = scan(1, peak=2 * POISON if ends == "failed" else 0.0)
        weakref.finalize(volume.voxels, gone.set)
        return volume

    async def scenario() -> None:
        async with running(batch_size=1, device=where) as loop:
            faulty.gate.clear()
            deadline = asyncio.get_running_loop().time() + 1.0 if ends == "late" else FAR
            asked = asyncio.create_task(ask(loop, gated, watched(), deadline))
            await wait_for(faulty.entered)
            if ends == "abandoned":
                asked.cancel()
            elif ends == "failed":
                faulty.gate.set()
            await asyncio.wait([asked])
            assert asked.cancelled() or asked.exception() is not None
            del asked
            faulty.gate.set()
            assert await asyncio.to_thread(gone.wait, 10)

    with without_garbage_collection():
        asyncio.run(scenario())
