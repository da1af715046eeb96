"""Several devices: which of them answers, and what is left when one of them fails."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.compute.device import HOST, NamedDevice, OnDevice
from app.engine.active_scans import ActiveScan, DetectRequest, Waiter
from app.engine.devices import Devices
from app.engine.host_pool import run_in_daemon_thread
from app.engine.metrics import Metrics
from app.errors import ModelRefused, NetworkFailed, NotReady
from app.inference.detector import Detection, Detector
from app.inference.load import load_checked
from app.io.volume import Volume
from app.model.registry import LoadedModel
from tests.support.device_loops import (
    FAR,
    Faulty,
    assert_same_landmarks,
    make_faulty,
    scan,
    until,
    wait_for,
    with_network,
)
from tests.support.model_folders import TILE, make_model_folder
from tests.support.services import (
    MODEL,
    RAW,
    running,
    shared_of,
    toy_models,
    toy_scan,
    toy_settings,
)

NAMES = ("cpu:0", "cpu:1")


@pytest.fixture
def networks(model: LoadedModel, tmp_path: Path) -> Iterator[list[Faulty]]:
    """Make a network for each of two devices, which can be held."""
    makers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        makers.append(make_faulty(tmp_path / name, model))
    yield [next(maker) for maker in makers]
    for maker in makers:
        next(maker, None)


def spread(model: LoadedModel, networks: list[Faulty]) -> LoadedModel:
    """Put a network of its own on each device."""
    copies = {index: with_network(model, module) for index, module in enumerate(networks)}
    return replace(copies[0], copies=copies)


class Running:
    """Two devices on the host, whose self-checks fail where a test says so."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.unsound: set[int] = set()
        self.checked: list[str] = []
        self.lost = threading.Event()
        named = tuple(NamedDevice(name, HOST.device) for name in NAMES)
        self.devices = Devices(named, 2, self.metrics, self.check, self.lost.set)

    def check(self, index: int) -> None:
        self.checked.append(threading.current_thread().name)
        if index in self.unsound:
            raise RuntimeError("unsound")

    async def __aenter__(self) -> "Running":
        self.devices.start()
        return self

    async def __aexit__(self, *_reason: object) -> None:
        await self.devices.stop()

    def ask(self, model: LoadedModel, volume: Volume) -> "asyncio.Task[Any]":
        """Ask for a scan in a task of its own."""
        request = DetectRequest(model, volume, FAR)

        async def run() -> Detection:
            return await self.devices.choose(request.key).run(request)

        return asyncio.create_task(run())

    async def end(self, index: int) -> None:
        """End the thread of a device; a new one replaces it if the self-check passes."""

        def die() -> None:
            raise SystemExit

        loop = self.devices.loops[index]
        with pytest.raises(NotReady):
            await asyncio.wrap_future(loop.queue.submit(die))
        if index in self.unsound:
            await until(lambda: loop.lost)


def test_two_scans_run_side_by_side(model: LoadedModel, networks: list[Faulty]) -> None:
    spread_model = spread(model, networks)

    async def scenario() -> list[Any]:
        async with Running() as running:
            for network in networks:
                network.gate.clear()
            asked = [running.ask(spread_model, scan(seed)) for seed in (1, 2)]
            # Both are held in their forward passes at the same time.
            for network in networks:
                await wait_for(network.entered)
            for network in networks:
                network.gate.set()
            return await asyncio.gather(*asked)

    for seed, detection in zip((1, 2), asyncio.run(scenario()), strict=True):
        assert_same_landmarks(detection, Detector(model).detect(scan(seed)))
    assert all(network.batches for network in networks)


def test_identical_scan_in_flight_is_shared_across_devices(
    model: LoadedModel, networks: list[Faulty]
) -> None:
    spread_model = spread(model, networks)

    async def scenario() -> None:
        async with Running() as running:
            networks[0].gate.clear()
            first = running.ask(spread_model, scan(1))
            await wait_for(networks[0].entered)
            # The other device is free, and yet not asked.
            second = running.ask(spread_model, scan(1))
            await asyncio.sleep(0)
            networks[0].gate.set()
            one, other = await asyncio.gather(first, second)
            assert one is other
            assert b"landmarkd_shared_total 1.0" in running.metrics.render()

    asyncio.run(scenario())
    assert networks[0].batches
    assert not networks[1].batches


def test_scan_goes_to_the_device_that_is_free_first(
    model: LoadedModel, networks: list[Faulty]
) -> None:
    spread_model = spread(model, networks)

    async def scenario() -> None:
        async with Running() as running:
            networks[0].gate.clear()
            held = running.ask(spread_model, scan(1, (60, 60, 90)))
            await wait_for(networks[0].entered)
            for seed in (2, 3, 4):
                await running.ask(spread_model, scan(seed))
            networks[0].gate.set()
            await held

    asyncio.run(scenario())
    assert len(networks[1].batches) >= 3


def test_lost_device_leaves_the_other_answering(model: LoadedModel, networks: list[Faulty]) -> None:
    spread_model = spread(model, networks)

    async def scenario() -> None:
        async with Running() as running:
            running.unsound = {0}
            await running.end(0)
            for seed in (1, 2):
                await running.ask(spread_model, scan(seed))
            devices = running.devices
            assert devices.healthy_count == 1
            assert devices.unhealthy_reason == "cpu:0: the device's thread has ended"
            healthy = [loop.unhealthy_reason is None for loop in devices.loops]
            assert healthy == [False, True]
            assert not running.lost.is_set()

    asyncio.run(scenario())
    assert not networks[0].batches


class Unusable(nn.Module):
    """A network on a CUDA device that has failed: from the first error on all calls raise."""

    def forward(self, _tiles: Tensor) -> Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_device_whose_driver_reports_an_error_is_checked_and_lost_if_it_fails(
    model: LoadedModel, networks: list[Faulty]
) -> None:
    """Or else it would be the first to be free again, and be given all scans."""
    copies = {0: with_network(model, Unusable()), 1: with_network(model, networks[1])}
    spread_model = replace(copies[0], copies=copies)

    async def scenario() -> None:
        async with Running() as running:
            first, second = running.devices.loops
            with pytest.raises(NetworkFailed, match="AcceleratorError"):
                await running.ask(spread_model, scan(1))
            await asyncio.wrap_future(first.queue.submit(lambda: None))
            assert running.checked == ["cpu:0"]
            assert first.unhealthy_reason is None
            running.unsound = {0}
            with pytest.raises(NetworkFailed, match="AcceleratorError"):
                await running.ask(spread_model, scan(2))
            await until(lambda: first.lost)
            for seed in (3, 4):
                await running.ask(spread_model, scan(seed))
            assert second.unhealthy_reason is None

    asyncio.run(scenario())
    assert networks[1].batches


def test_on_lost_is_called_only_when_all_devices_are_lost(model: LoadedModel) -> None:
    async def scenario() -> None:
        async with Running() as running:
            running.unsound = {0, 1}
            await running.end(0)
            assert not running.lost.is_set()
            await running.end(1)
            assert running.lost.is_set()
            assert running.devices.healthy_count == 0
            with pytest.raises(NotReady, match="cpu:1: the device's thread has ended"):
                await running.ask(model, scan(1))
            with pytest.raises(NotReady, match="all are lost"):
                running.devices.load(lambda _device, **_options: model)

    asyncio.run(scenario())


def test_dead_thread_is_replaced_on_its_own_device(model: LoadedModel) -> None:
    async def scenario() -> None:
        async with Running() as running:
            await running.end(1)
            # Answered by the new thread, once it has passed its self-check.
            loop = running.devices.loops[1]
            name = await asyncio.wrap_future(
                loop.queue.submit(lambda: threading.current_thread().name)
            )
            assert name == "cpu:1"
            assert running.checked == ["cpu:1"]
            assert await running.ask(model, scan(1))

    asyncio.run(scenario())


def test_model_is_loaded_on_every_device_and_only_its_thread_touches_it(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    threads: list[str] = []

    def load_on(device: torch.device, *, on_device: OnDevice) -> LoadedModel:
        threads.append(on_device(lambda: threading.current_thread().name))
        assert threading.current_thread().name not in NAMES
        return load_checked(folder, device, on_device=on_device)

    async def scenario() -> LoadedModel:
        async with Running() as running:
            return await run_in_daemon_thread(lambda: running.devices.load(load_on))

    loaded = asyncio.run(scenario())
    assert sorted(threads) == list(NAMES)
    assert loaded.on(0) is not loaded.on(1)
    assert loaded.on(0).network is not loaded.on(1).network
    assert loaded.on(1).digest == loaded.digest


def test_model_is_loaded_on_the_others_while_a_device_is_lost(model: LoadedModel) -> None:
    begun, lost = threading.Barrier(len(NAMES) + 1), threading.Event()

    def load_on(_: torch.device, *, on_device: OnDevice) -> LoadedModel:
        begun.wait(30)
        assert lost.wait(30)
        on_device(lambda: None)
        return model

    async def scenario() -> LoadedModel:
        async with Running() as running:
            running.unsound = {1}
            loading = asyncio.create_task(
                run_in_daemon_thread(lambda: running.devices.load(load_on))
            )
            await asyncio.to_thread(begun.wait, 30)
            await running.end(1)
            lost.set()
            return await loading

    assert asyncio.run(scenario()).copies == {0: model}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("refuse", r"toy: selfcheck: no \(on cpu:1\)"),
        ("write", "toy: expected a folder that stays as it is"),
    ],
)
def test_model_that_one_device_refuses_or_gets_in_another_state_is_refused(
    tmp_path: Path, change: str, message: str
) -> None:
    folder = make_model_folder(tmp_path)
    manifest = (folder / "model.toml").read_text()

    def load_on(device: torch.device, *, on_device: OnDevice) -> LoadedModel:
        if on_device(lambda: threading.current_thread().name) == "cpu:1":
            if change == "refuse":
                raise ModelRefused("toy: selfcheck: no")
            assert loaded.wait(30)
            (folder / "model.toml").write_text(f"{manifest}# newer\n")
            return load_checked(folder, device, on_device=on_device)
        model = load_checked(folder, device, on_device=on_device)
        loaded.set()
        return model

    loaded = threading.Event()

    async def scenario() -> None:
        async with Running() as running:
            with pytest.raises(ModelRefused, match=message):
                await run_in_daemon_thread(lambda: running.devices.load(load_on))

    asyncio.run(scenario())


def test_batch_sizes_are_learned_on_each_device_by_itself(
    model: LoadedModel, networks: list[Faulty]
) -> None:
    spread_model = spread(model, networks)

    async def scenario() -> None:
        async with Running() as running:
            networks[1].gate.clear()
            for seed in (1, 2, 3):
                await running.ask(spread_model, scan(seed))
            one, other = (loop.sizes.timings(model.digest) for loop in running.devices.loops)
            assert one
            assert not other
            assert (
                running.devices.estimate_latency_s((model.digest, TILE), 9) == 0.0
            )  # as far as is known

    asyncio.run(scenario())


def test_scan_that_is_prepared_is_no_tile_that_waits(model: LoadedModel) -> None:
    async def scenario() -> None:
        unstarted, request = Running(), DetectRequest(model, scan(1), FAR)
        waiter = Waiter(request, asyncio.get_running_loop().create_future())
        active = ActiveScan(request, Detector(model).passes(scan(1)), [waiter])
        queue, registry = unstarted.devices.loops[1].queue, unstarted.metrics.registry
        names = ("landmarkd_scans_preparing", "landmarkd_queue_tiles")
        queue.add(active)
        assert [registry.get_sample_value(name) for name in names] == [1, 0]
        queue.add_tiles(active, "lane", 5)
        assert [registry.get_sample_value(name) for name in names] == [0, 5]

    asyncio.run(scenario())


def test_reload_swaps_all_copies_at_once_and_only_if_all_pass(tmp_path: Path) -> None:
    models = toy_models(tmp_path)
    file = models / MODEL / "model.toml"
    with running(toy_settings(models, device=",".join(NAMES))) as client:
        engine = shared_of(client).engine
        portal = client.portal
        assert portal is not None
        old = engine.registry.get()
        file.write_text(file.read_text().replace('"1.0.0"', '"1.1.0"'))
        portal.call(engine.reload, MODEL)
        new = engine.registry.get()
        assert [copy.manifest.version for copy in new.copies.values()] == ["1.1.0"] * 2
        assert old.on(1).manifest.version == "1.0.0"
        (models / MODEL / "weights.safetensors").write_bytes(b"other")
        with pytest.raises(ModelRefused, match=r"network.sha256: .* \(on cpu:0\)"):
            portal.call(engine.reload, MODEL)
        assert engine.registry.get() is new
        shown = client.get(f"/v1/models/{MODEL}").json()["devices"]
        assert [device["name"] for device in shown] == list(NAMES)
        assert client.post("/v1/landmarks", content=toy_scan(), headers=RAW).status_code == 200
        text = client.get("/metrics").text
        assert all(f'landmarkd_batch_size{{device="{name}"}}' in text for name in NAMES)
