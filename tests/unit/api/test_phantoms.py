"""The scans that the page generates."""

import asyncio
import threading

import pytest

from app.api.ui import phantoms as phantoms_module
from app.api.ui.phantoms import MAX_KEPT, MAX_WAITING, PhantomScans
from app.errors import QueueFull


class Maker:
    """Makes scans when it is told to, and counts them."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.at_once = self.most_at_once = 0
        self.go = threading.Event()

    def __call__(self, seed: int) -> bytes:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.go.wait(30)
        self.at_once -= 1
        self.made.append(seed)
        return bytes([seed])


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker()
    monkeypatch.setattr(phantoms_module, "_make", made)
    return made


def test_scans_are_made_one_at_a_time_and_further_requests_refused(maker: Maker) -> None:
    async def ask() -> None:
        scans = PhantomScans()
        asked = [asyncio.create_task(scans.get(seed)) for seed in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await scans.get(99)
        assert caught.value.retry_after_s == 1
        maker.go.set()
        assert await asyncio.gather(*asked) == [bytes([seed]) for seed in range(MAX_WAITING)]
        assert await scans.get(99) == bytes([99])

    asyncio.run(ask())
    assert maker.most_at_once == 1


def test_latest_scans_are_kept_and_one_is_made_once(maker: Maker) -> None:
    async def ask() -> None:
        scans = PhantomScans()
        maker.go.set()
        assert list(await asyncio.gather(scans.get(1), scans.get(1))) == [b"\1", b"\1"]
        for seed in range(2, MAX_KEPT + 1):
            await scans.get(seed)
        assert await scans.get(1) == b"\1"
        assert maker.made == list(range(1, MAX_KEPT + 1))
        await scans.get(MAX_KEPT + 1)
        await scans.get(2)
        assert maker.made[-2:] == [MAX_KEPT + 1, 2]

    asyncio.run(ask())
