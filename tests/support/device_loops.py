"""A device loop with a network that can be held and poisoned, for tests."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from app.compute.device import HOST, NamedDevice
from app.engine.active_scans import DetectRequest
from app.engine.batch_sizes import BatchSizes
from app.engine.device_loop import DeviceLoop
from app.engine.metrics import Metrics
from app.inference.detector import Detection
from app.inference.load import load_checked
from app.io.volume import Volume
from app.model.loader import load_module
from app.model.network import Network
from app.model.registry import LoadedModel
from tests.support.model_folders import make_model_folder

POISON = 1e6
FAR = 1e9
CPU = torch.device("cpu")
EVENT_TIMEOUT_S = 30.0


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
        assert self.gate.wait(EVENT_TIMEOUT_S)
        self.batches.append(len(tiles))
        if float(tiles.max()) >= POISON:
            raise RuntimeError("poisoned")
        output: Tensor = self.inner(tiles)
        return output


def load_toy(folder: Path) -> LoadedModel:
    """Make and load a toy model to whose network voxel values come unchanged."""
    made = make_model_folder(
        folder, input={"intensity": {"method": "none"}}, voting={"threshold": 0.45}
    )
    return load_checked(made, CPU)


def make_faulty(folder: Path, model: LoadedModel) -> Iterator[Faulty]:
    """Make the toy's network so that it can be held and poisoned; release it afterwards."""
    made = make_model_folder(folder, input={"intensity": {"method": "none"}})
    module = Faulty(load_module(made, model.manifest))
    yield module
    module.gate.set()


def with_network(model: LoadedModel, module: nn.Module) -> LoadedModel:
    """Replace a model's network."""
    return replace(model, network=Network(model.manifest, module, CPU))


def scan(seed: int, shape: tuple[int, int, int] = (30, 33, 70), peak: float = 0.0) -> Volume:
    voxels = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    voxels[10, 11, 12] += peak
    return Volume(voxels, np.diag([1.0, 1.5, 2.0, 1.0]), str(seed))


@asynccontextmanager
async def running(batch_size: int, device: NamedDevice = HOST) -> AsyncIterator[DeviceLoop]:
    """Run a device loop until the block ends."""
    loop = DeviceLoop(BatchSizes(batch_size), Metrics(), device=device)
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop()


async def ask(
    loop: DeviceLoop, model: LoadedModel, volume: Volume, deadline: float = FAR, frame: int = 0
) -> Detection:
    """Ask a device for the landmarks of a scan; by default there is no deadline."""
    return await loop.run(DetectRequest(model, volume, deadline, frame))


async def wait_for(event: threading.Event) -> None:
    """Wait for another thread's event; with a limit, as asyncio joins the thread that waits."""
    assert await asyncio.to_thread(event.wait, EVENT_TIMEOUT_S)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds that only they and other threads change."""
    while not condition():  # noqa: ASYNC110 - nothing sets an event
        await asyncio.sleep(0)


def assert_same_landmarks(first: Detection, second: Detection) -> None:
    for one, other in zip(first.landmarks, second.landmarks, strict=True):
        assert one.status == other.status
        if one.ijk is not None and other.ijk is not None:
            np.testing.assert_allclose(one.ijk, other.ijk, atol=1e-3)
