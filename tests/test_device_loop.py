"""The device loop: many requests, one device, and faults that hurt only the guilty."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.detector import Detection, Detector, load_checked
from app.device_loop import DeviceLoop
from app.errors import LandmarkdError, NetworkFailed, NotReady
from app.metrics import Metrics
from app.module import load_module
from app.network import Network
from app.registry import LoadedModel
from app.volume import Volume
from tests.model_folders import make_model_folder

POISON = 1e6
FAR = 1e9
CPU = torch.device("cpu")


class Faulty(nn.Module):
    """A network that raises for poisoned tiles, and that can be held before it answers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches: list[int] = []

    def forward(self, tiles: Tensor) -> Tensor:
        self.entered.set()
        assert self.gate.wait(timeout=30)
        self.batches.append(len(tiles))
        if float(tiles.max()) >= POISON:
            raise RuntimeError("poisoned")
        output: Tensor = self.inner(tiles)
        return output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_model_folder(
        tmp_path_factory.mktemp("models"),
        input={"intensity": {"method": "none"}},
        voting={"threshold": 0.45},
    )
    return load_checked(folder, CPU)


@pytest.fixture
def faulty(model: LoadedModel, tmp_path: Path) -> Iterator[Faulty]:
    folder = make_model_folder(tmp_path, input={"intensity": {"method": "none"}})
    module = Faulty(load_module(folder, model.manifest))
    yield module
    module.gate.set()


def detector_with(model: LoadedModel, module: nn.Module) -> Detector:
    return Detector(replace(model, network=Network(model.manifest, module, CPU)))


def scan(seed: int, shape: tuple[int, int, int] = (30, 33, 70), peak: float = 0.0) -> Volume:
    voxels = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    voxels[10, 11, 12] += peak
    return Volume(voxels, np.diag([1.0, 1.5, 2.0, 1.0]), 0, str(seed), ())


@asynccontextmanager
async def running(batch_size: int) -> AsyncIterator[DeviceLoop]:
    loop = DeviceLoop(batch_size, Metrics())
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop()


async def ask(loop: DeviceLoop, detector: Detector, volume: Volume) -> Detection:
    return await loop.detect(detector, volume, deadline=FAR, decode_s=0.0)


def assert_same_landmarks(first: Detection, second: Detection) -> None:
    for one, other in zip(first.landmarks, second.landmarks, strict=True):
        assert one.status == other.status
        if one.ijk is not None and other.ijk is not None:
            np.testing.assert_allclose(one.ijk, other.ijk, atol=1e-3)


def test_batch_of_strangers_changes_nothing(model: LoadedModel) -> None:
    detector = Detector(model)
    volumes = [scan(1), scan(2, (45, 20, 38)), scan(3, (12, 60, 90)), scan(4)]

    async def together() -> list[Detection]:
        async with running(batch_size=5) as loop:
            return await asyncio.gather(*[ask(loop, detector, volume) for volume in volumes])

    for volume, detection in zip(volumes, asyncio.run(together()), strict=True):
        assert_same_landmarks(detection, detector.detect(volume))
        assert detection.volume.digest == volume.digest


def test_tiles_of_several_requests_share_a_batch(model: LoadedModel, faulty: Faulty) -> None:
    detector = detector_with(model, faulty)

    async def scenario() -> None:
        async with running(batch_size=8) as loop:
            faulty.gate.clear()
            first = asyncio.create_task(ask(loop, detector, scan(1, (20, 20, 20))))
            await asyncio.to_thread(faulty.entered.wait)
            others = [asyncio.create_task(ask(loop, detector, scan(n))) for n in (2, 3)]
            while loop.depth < 2:  # noqa: ASYNC110 - only lets others run
                await asyncio.sleep(0)
            faulty.gate.set()
            await asyncio.gather(first, *others)

    asyncio.run(scenario())
    assert faulty.batches[0] == 1
    assert sum(faulty.batches) == 1 + 2 * len(Detector(model).prepare(scan(2)).plan)


def test_one_bad_scan_fails_alone(model: LoadedModel, faulty: Faulty) -> None:
    detector = detector_with(model, faulty)
    good, bad = scan(1), scan(2, peak=2 * POISON)

    async def scenario() -> list[Detection | BaseException]:
        async with running(batch_size=6) as loop:
            return await asyncio.gather(
                *[ask(loop, detector, volume) for volume in (good, bad, good)],
                return_exceptions=True,
            )

    first, guilty, last = asyncio.run(scenario())
    assert isinstance(guilty, NetworkFailed)
    assert isinstance(first, Detection)
    assert isinstance(last, Detection)
    assert_same_landmarks(first, Detector(model).detect(good))
    assert_same_landmarks(first, last)


def test_cancelled_request_leaves_its_batch_unharmed(model: LoadedModel, faulty: Faulty) -> None:
    detector = detector_with(model, faulty)

    async def scenario() -> Detection:
        async with running(batch_size=4) as loop:
            faulty.gate.clear()
            stays = asyncio.create_task(ask(loop, detector, scan(1)))
            await asyncio.to_thread(faulty.entered.wait)
            leaves = asyncio.create_task(ask(loop, detector, scan(2)))
            while not loop.depth:  # noqa: ASYNC110 - only lets others run
                await asyncio.sleep(0)
            leaves.cancel()
            faulty.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            detection = await stays
            assert loop.depth == 0
            return detection

    assert_same_landmarks(asyncio.run(scenario()), Detector(model).detect(scan(1)))


def test_scan_that_cannot_be_prepared_fails_alone(model: LoadedModel) -> None:
    broken = Volume(np.zeros((3, 4)), np.eye(4), 0, "", ())
    detector = Detector(model)

    async def scenario() -> tuple[BaseException | Detection, ...]:
        async with running(batch_size=2) as loop:
            requests = [ask(loop, detector, volume) for volume in (broken, scan(1))]
            return tuple(await asyncio.gather(*requests, return_exceptions=True))

    guilty, fine = asyncio.run(scenario())
    assert isinstance(guilty, Exception)
    assert not isinstance(guilty, LandmarkdError)
    assert isinstance(fine, Detection)


def test_whoever_still_waits_is_told_when_the_loop_stops(
    model: LoadedModel, faulty: Faulty
) -> None:
    detector = detector_with(model, faulty)

    async def scenario() -> None:
        loop = DeviceLoop(2, Metrics())
        loop.start()
        faulty.gate.clear()
        waiting = asyncio.create_task(ask(loop, detector, scan(1)))
        await asyncio.to_thread(faulty.entered.wait)
        stopping = asyncio.create_task(loop.stop())
        await asyncio.sleep(0)
        faulty.gate.set()
        with pytest.raises(NotReady):
            await waiting
        await stopping

    asyncio.run(scenario())
