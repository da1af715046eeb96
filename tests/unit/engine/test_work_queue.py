"""The queue between the event loop and a device's thread."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.engine.active_scans import ActiveScan, DetectRequest, Waiter
from app.engine.scheduler import Batch
from app.engine.work_queue import TimedOut, WorkQueue
from app.errors import NotReady
from app.inference.detector import Detector
from app.model.registry import LoadedModel
from tests.support.device_loops import FAR, Faulty, ask, running, scan, wait_for, with_network


def test_waiting_ends_in_time_though_other_changes_wake_it(model: LoadedModel) -> None:
    """Scans that come and go must not put off the self-check of an unhealthy device."""
    queue = WorkQueue(lambda _: 1, lambda _: 1.0)
    active = ActiveScan(DetectRequest(model, scan(1), FAR), Detector(model).passes(scan(1)), [])
    stop = threading.Event()

    def notify() -> None:
        for _ in range(100):
            queue.update_deadline(active)
            if stop.wait(0.03):
                return

    thread = threading.Thread(target=notify)
    thread.start()
    start = time.monotonic()
    try:
        assert queue.take(0.3, calls_only=True) == TimedOut()
        assert time.monotonic() - start < 2.0
    finally:
        stop.set()
        thread.join()


def test_scan_whose_first_waiter_gave_up_runs_for_another_that_joined(model: LoadedModel) -> None:
    """Between the deadline of the first and its leave, the device's thread may go to sleep."""

    async def wait(deadline: float) -> Waiter:
        request = DetectRequest(model, scan(1), deadline)
        return Waiter(request, asyncio.get_running_loop().create_future())

    first, another = asyncio.run(wait(0.0)), asyncio.run(wait(FAR))
    active = ActiveScan(first.request, Detector(model).passes(scan(1)), [first, another])
    queue = WorkQueue(lambda _: 1, lambda _: 1.0)
    queue.add(active)
    queue.add_tiles(active, "lane", 1)
    active.waiters.remove(first)
    thread = threading.Thread(target=queue.update_deadline, args=(active,))
    start = time.monotonic()
    with queue._changed:  # noqa: SLF001 - let go of by who sleeps, so that the thread comes next
        thread.start()
        assert queue.take(30) == Batch("lane", ((active, 0),))
    assert time.monotonic() - start < 20
    thread.join()


def test_scan_prepared_while_all_scans_are_failed_is_not_queued(
    model: LoadedModel, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host thread may finish preparing a scan at any moment, this one included."""
    remove = WorkQueue.remove

    def remove_then_add_tiles(queue: WorkQueue, active: ActiveScan) -> int:
        saved = remove(queue, active)
        queue.add_tiles(active, "lane", 1)
        return saved

    async def scenario() -> None:
        async with running(batch_size=1) as loop:
            faulty.gate.clear()
            waiting = asyncio.create_task(ask(loop, with_network(model, faulty), scan(1)))
            await wait_for(faulty.entered)
            monkeypatch.setattr(WorkQueue, "remove", remove_then_add_tiles)
            stopping = asyncio.create_task(loop.stop())
            await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
            faulty.gate.set()
            await stopping
            with pytest.raises(NotReady):
                await waiting
            assert loop.queue.unprepared == loop.queue.waiting_tiles == 0

    asyncio.run(scenario())


def test_batch_beside_a_smaller_one_waits_no_more_once_the_queue_is_closed(
    model: LoadedModel,
) -> None:
    """The device's thread has ended then, which would tell that the smaller one has."""
    queue = WorkQueue(lambda _: 1, lambda _: 1.0, batches=2)
    waits = threading.Event()

    @contextmanager
    def pause() -> Iterator[None]:
        waits.set()
        yield

    async def take(seed: int, tiles: int) -> Batch[ActiveScan]:
        request = DetectRequest(model, scan(seed), FAR)
        waiter = Waiter(request, asyncio.get_running_loop().create_future())
        active = ActiveScan(request, Detector(model).passes(scan(seed)), [waiter])
        queue.add(active)
        queue.add_tiles(active, "lane", tiles)
        batch = queue.take(0)
        assert isinstance(batch, Batch)
        return batch

    large, _ = asyncio.run(take(1, 9)), asyncio.run(take(2, 1))
    thread = threading.Thread(target=queue.wait_for_smaller, args=(large, 600.0, pause()))
    thread.start()
    assert waits.wait(30)
    queue.close()
    thread.join(30)
    assert not thread.is_alive()
    assert queue.wait_for_smaller(large, 600.0, pause()) == 0.0
