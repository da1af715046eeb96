"""A device's thread that ends: its jobs fail, and a new thread replaces it once."""

import asyncio
import threading

import pytest
from torch import Tensor, nn

from app.compute.device import NamedDevice
from app.engine.batch_sizes import BatchSizes
from app.engine.device_loop import DeviceLoop
from app.engine.metrics import Metrics
from app.errors import NotReady
from app.inference.detector import Detector
from app.model.registry import LoadedModel
from tests.support.device_loops import ask, assert_same_landmarks, scan, with_network


class EndsItsThread(nn.Module):
    """A network that ends the thread which runs it."""

    def forward(self, tiles: Tensor) -> Tensor:
        raise SystemExit(f"{len(tiles)} tiles")


@pytest.mark.parametrize("sound", [True, False])
def test_dead_thread_fails_its_jobs_and_a_new_one_must_pass_the_self_check(
    where: NamedDevice, model: LoadedModel, sound: bool
) -> None:
    checks: list[str] = []

    async def scenario() -> None:
        lost = asyncio.Event()

        def check() -> None:
            checks.append(threading.current_thread().name)
            if not sound:
                raise RuntimeError("unsound")

        loop = DeviceLoop(BatchSizes(4), Metrics(), check, lost.set, where)
        loop.start()
        fatal = with_network(model, EndsItsThread())
        waiting = [ask(loop, fatal, scan(n)) for n in (1, 2)]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [NotReady, NotReady]
        if sound:
            assert await asyncio.wrap_future(loop.queue.submit(lambda: 5)) == 5
            assert_same_landmarks(await ask(loop, model, scan(1)), Detector(model).detect(scan(1)))
        else:
            await lost.wait()
            with pytest.raises(NotReady, match="thread has ended"):
                await ask(loop, model, scan(1))
        await loop.stop()

    asyncio.run(scenario())
    assert checks == ["cpu"]


def test_device_whose_thread_ends_where_no_other_can_start_is_lost(
    where: NamedDevice,
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def start_no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # As Python says it.

    async def scenario() -> None:
        lost = asyncio.Event()
        loop = DeviceLoop(BatchSizes(4), Metrics(), on_lost=lost.set, device=where)
        loop.start()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_no_thread)
            with pytest.raises(NotReady):
                await ask(loop, with_network(model, EndsItsThread()), scan(1))
            async with asyncio.timeout(60):
                await lost.wait()
        assert loop.lost
        await loop.stop()

    asyncio.run(scenario())
    (failure,) = [line for line in caplog.records if line.message == "no thread can start"]
    assert "allow more processes and threads" in getattr(failure, "reason", "")
