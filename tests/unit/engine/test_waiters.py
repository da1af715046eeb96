"""Waiters: what those who wait for a scan are told, and leave behind."""

import asyncio
import errno
import time
from collections.abc import Callable

import pytest

from app.engine import device_worker
from app.engine.active_scans import DetectRequest, Progress
from app.engine.batch_sizes import BatchSizes
from app.engine.device_loop import DeviceLoop
from app.engine.metrics import Metrics
from app.inference.batch_runner import InFlightBatch, IsActive, Tiles, launch_batch
from app.inference.detector import Detector
from app.model.registry import LoadedModel
from tests.support.device_loops import FAR, Faulty, ask, running, scan, with_network


def test_timeout_that_a_scan_itself_raises_is_none_of_its_deadline(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # As of a disk far away.

    monkeypatch.setattr(Detector, "prepare", fail)

    async def scenario() -> None:
        async with running(batch_size=1) as loop:
            with pytest.raises(TimeoutError, match="Connection timed out"):
                await ask(loop, model, scan(1))

    asyncio.run(scenario())


def test_request_that_cannot_be_told_its_progress_leaves_nothing_behind(
    model: LoadedModel, faulty: Faulty
) -> None:
    gated = with_network(model, faulty)
    faulty.gate.clear()

    def fail(_: Progress) -> None:
        raise ValueError("told nobody")

    async def scenario() -> None:
        async with running(batch_size=1) as loop:
            with pytest.raises(ValueError, match="told nobody"):
                await loop.run(DetectRequest(gated, scan(1), FAR, on_progress=fail))
            assert loop.load == (0.0, 0)
            faulty.gate.set()

    asyncio.run(scenario())


def test_tiles_that_nobody_waits_for_at_their_launch_are_not_counted_as_run(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        metrics, here = Metrics(), asyncio.get_running_loop()
        loop = DeviceLoop(BatchSizes(1), metrics)
        asked = asyncio.create_task(ask(loop, model, scan(1)))

        def launch(
            tiles: Tiles, is_active: IsActive, give_way: Callable[[], None] | None = None
        ) -> InFlightBatch:
            here.call_soon_threadsafe(asked.cancel)
            while is_active(tiles[0][0]):
                time.sleep(0.001)
            return launch_batch(tiles, is_active, give_way)

        monkeypatch.setattr(device_worker, "launch_batch", launch)
        loop.start()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await loop.stop()
        assert b"\nlandmarkd_tiles_total 0.0\n" in metrics.render()
        assert b"\nlandmarkd_batch_tiles_count 0.0\n" in metrics.render()

    asyncio.run(scenario())
