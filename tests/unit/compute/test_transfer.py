"""Uploads: the same values either way, and on CUDA no thread waits for them."""

import asyncio
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from app.compute import transfer
from app.compute.device import NamedDevice
from app.compute.transfer import (
    READY,
    CopyStreams,
    HostCopy,
    Stopwatch,
    copy_pinned,
    record_event,
    upload,
    upload_pinned,
)
from app.engine.batch_sizes import BatchSizes
from app.engine.device_loop import DeviceLoop
from app.engine.metrics import Metrics
from app.geometry import translation
from app.inference.detector import Detection, Detector
from app.inference.forward import collect, launch
from app.inference.load import load_checked
from app.model.sections import InputSpec, IntensitySpec
from app.preprocessing.grid import make_grid
from app.preprocessing.posed_grid import Pose, make_posed_grid
from tests.support.device_loops import CPU, ask, assert_same_landmarks, load_toy, scan
from tests.support.model_folders import make_model_folder

CUDA = torch.device("cuda", 0)
DTYPES = (*("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "float32", "float64"),)
FLIPS = ((), (0,), (2,), (0, 1, 2))
ORDERS: tuple[Literal["K", "C"], ...] = ("K", "C")


def views(dtype: str) -> Iterator[np.ndarray]:
    """View one array in several orders and directions, as orienting a scan does."""
    values = np.random.default_rng(5).integers(0, 120, (7, 5, 9)).astype(dtype)
    stored = np.asfortranarray(values)
    for order in permutations(range(3)):
        for flips in FLIPS:
            yield np.flip(stored.transpose(order), flips)
    # Cut out of a larger one, so with gaps between its lines.
    yield stored[1:6, 1:4, 2:7]


def plain_copy(array: np.ndarray, order: Literal["K", "C"]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32, order=order))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_upload_to_the_host_is_the_plain_copy(dtype: str, order: Literal["K", "C"]) -> None:
    for array in views(dtype):
        values, expected = upload(array, CPU, order), plain_copy(array, order)
        assert torch.equal(values, expected)
        assert values.stride() == expected.stride()
        assert not np.shares_memory(values.numpy(), array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_array_copied_in_chunks_is_the_plain_copy(
    dtype: str, order: Literal["K", "C"], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 100, transfer.CHUNK_BYTES):
        monkeypatch.setattr(transfer, "CHUNK_BYTES", size)
        for array in views(dtype):
            for part in (array, array[0], array[0, 0]):
                np.testing.assert_array_equal(copy_pinned(part, CPU).numpy(), part)
            values, expected = upload_pinned(array, CPU, order), plain_copy(array, order)
            assert torch.equal(values, expected)
            assert values.stride() == expected.stride()


def test_cpu_needs_no_events() -> None:
    copies = CopyStreams(CPU)
    with copies.use():
        values = torch.ones(3, 4, 5)
        assert record_event(CPU) is READY
    READY.wait(values)


def test_numbers_are_copied_in_their_order() -> None:
    assert HostCopy(torch.tensor([7, 1 << 40, 0])).wait() == [7, 1 << 40, 0]


def test_stopwatch_shows_the_same_whenever_it_is_read() -> None:
    watch = Stopwatch(CPU)
    torch.ones(50, 60, 70).sum()
    watch.end_stage()
    (seconds,) = watch.seconds()
    assert watch.seconds() == [seconds]
    assert 0 < seconds < 10


def test_stopwatch_tells_stages_apart() -> None:
    start_s = time.perf_counter()
    watch = Stopwatch(CPU)
    for wait_s in (0.1, 0.0, 0.2):
        ready_s = time.perf_counter() + wait_s
        while time.perf_counter() < ready_s:
            pass
        watch.end_stage()
    all_s = time.perf_counter() - start_s
    first, second, third = watch.seconds()
    assert first >= 0.1
    assert third >= 0.2
    assert first + second + third < all_s


def test_stopwatch_leaves_out_what_it_is_paused_for() -> None:
    watch = Stopwatch(CPU)
    start_s = time.perf_counter()
    with watch.paused():
        while time.perf_counter() < start_s + 0.2:
            pass
    watch.end_stage()
    assert sum(watch.seconds()) < time.perf_counter() - start_s - 0.2


@contextmanager
def no_synchronising() -> Iterator[None]:
    """Make every call fail that synchronises the host with the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That it is a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_upload_to_cuda_equals_the_plain_copy(dtype: str, order: Literal["K", "C"]) -> None:
    for array in views(dtype):
        with no_synchronising():
            values = upload(array, CUDA, order)
        expected = plain_copy(array, order)
        assert torch.equal(values.cpu(), expected)
        assert values.stride() == expected.stride()


@pytest.mark.gpu
def test_scan_is_prepared_while_the_device_computes_for_another() -> None:
    copies, busy = CopyStreams(CUDA), torch.rand(8192, 8192, device=CUDA)
    array = np.ones((64, 48, 80), np.int16)
    with copies.use():  # A kernel's first use loads it, which waits for the device.
        upload(array, CUDA, "K").mul(2).sum()
    busy @ busy
    torch.cuda.synchronize()
    for _ in range(50):
        busy = busy @ busy
    with copies.use():
        values = upload(array, CUDA, "K") * 2
        prepared = torch.cuda.Event(enable_timing=True)
        prepared.record()
        ready = record_event(CUDA)
    computed = torch.cuda.Event(enable_timing=True)
    computed.record()
    ready.wait(values)
    total = values.sum()
    assert float(total) == 2.0 * array.size
    computed.synchronize()
    assert prepared.elapsed_time(computed) > 0


@pytest.mark.gpu
def test_making_grids_does_not_synchronise() -> None:
    volume = scan(3)
    spec = InputSpec(
        orientation="RAS",
        spacing_mm=(2.5, 1.5, 2.0),
        tile_shape=(24, 16, 20),
        intensity=IntensitySpec(method="window", lower=0.0, upper=1.0),
    )
    pose = Pose(translation([15.0, 24.0, 70.0]), 1.0)
    make_posed_grid(volume, pose, spec, (0.0, 1.0), CUDA)  # Loads kernels.
    with no_synchronising():
        grid = make_grid(volume, spec, CUDA)
        posed = make_posed_grid(volume, pose, spec, (0.0, 1.0), CUDA)
    on_host = make_grid(volume, spec, CPU).voxels
    torch.testing.assert_close(grid.voxels.cpu(), on_host, atol=1e-5, rtol=0)
    on_host = make_posed_grid(volume, pose, spec, (0.0, 1.0), CPU).voxels
    assert on_host.std() > 0.01
    # On the host, its values have sixteen bits.
    torch.testing.assert_close(posed.voxels.cpu(), on_host, atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_launching_a_pass_does_not_synchronise(tmp_path: Path) -> None:
    """Nor do its votes wait for what the device was given after it."""
    model = load_checked(make_model_folder(tmp_path), CUDA)
    with CopyStreams(CUDA).use():
        state = Detector(model).prepare(scan(1))
        state.grid_ready = record_event(CUDA)
    tiles = [(state, index) for index in range(2)]
    collect(launch(tiles))  # Compiles what there is to compile.
    state.votes.clear()
    busy = torch.rand(8192, 8192, device=CUDA)
    with no_synchronising():
        first = launch(tiles)
        for _ in range(50):
            busy = busy @ busy
        behind = torch.cuda.current_stream().record_event()
    assert collect(first) > 0
    assert state.votes
    behind.synchronize()


@pytest.mark.gpu
def test_numbers_are_copied_before_later_work_is_done() -> None:
    busy = torch.rand(8192, 8192, device=CUDA)
    torch.cuda.synchronize()
    with no_synchronising():
        copying = HostCopy(torch.arange(3, 5, device=CUDA))
        for _ in range(50):
            busy = busy @ busy
        behind = torch.cuda.current_stream().record_event()
    assert copying.wait() == [3, 4]
    assert not behind.query()


@pytest.mark.gpu
def test_loop_on_cuda_finds_what_is_found_without_streams(tmp_path: Path) -> None:
    load_toy(tmp_path)
    model = load_checked(tmp_path / "toy", CUDA)
    volumes = [scan(seed) for seed in (1, 2, 3)]

    async def scenario() -> list[Detection]:
        loop = DeviceLoop(BatchSizes(2), Metrics(), device=NamedDevice("cuda:0", CUDA))
        loop.start()
        try:
            return await asyncio.gather(*[ask(loop, model, one) for one in volumes])
        finally:
            await loop.stop()

    for volume, detection in zip(volumes, asyncio.run(scenario()), strict=True):
        # The same scan prepared and run without any stream, on the same device.
        assert_same_landmarks(detection, Detector(model).detect(volume))
        assert detection.timing.network > 0
        assert detection.timing.vote > 0
