"""Waiters: what those who wait for a scan are told, and leave behind."""

import asyncio
import errno

import pytest

from app.engine.active_scans import DetectRequest, Progress
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
