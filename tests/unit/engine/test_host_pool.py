"""Threads for work on the host."""

import asyncio
import errno
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from queue import SimpleQueue
from threading import Event

import pytest
import torch
from torch import Tensor

from app.engine.fair_budget import FairBudget
from app.engine.host_pool import HostPool, run_in_daemon_thread
from app.errors import BadVoxels, DeadlineExceeded, Draining, StartupError
from tests.support.memory import without_garbage_collection

WAIT_S = 30.0


def fail() -> int:
    raise BadVoxels("expected voxels")


def test_work_is_done_by_a_thread_of_the_pool_until_it_is_closed() -> None:
    names: SimpleQueue[str] = SimpleQueue()
    pool = HostPool("host", 1)
    pool.submit(lambda: names.put(threading.current_thread().name))
    assert names.get(timeout=WAIT_S).startswith("host")
    pool.close()
    pool.submit(lambda: names.put("closed"))
    assert names.empty()


def start_no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")  # As Python says it.


def test_work_is_done_where_no_thread_can_start_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, meeting = HostPool("host", 3), threading.Barrier(4, timeout=WAIT_S)
    monkeypatch.setattr(threading.Thread, "start", start_no_thread)
    for _ in range(3):
        pool.submit(meeting.wait)
    meeting.wait()
    pool.close()


def test_pool_for_which_no_thread_can_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", start_no_thread)
    with pytest.raises(StartupError, match="lets 3 threads start for host, got: can't start new"):
        HostPool("host", 3)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="sums in one order on one core")
def test_first_product_in_a_thread_sums_in_the_order_of_all_others() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(10, 24, generator=generator)
    volume = torch.randn(24, 300, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pool = HostPool("host", 1)
        products: SimpleQueue[Tensor] = SimpleQueue()
        pool.submit(lambda: products.put(matrix @ volume))
        product = products.get(timeout=WAIT_S)
        pool.close()
        assert torch.equal(product, matrix @ volume)
    finally:
        torch.set_num_threads(threads)


def test_result_of_work_is_awaited() -> None:
    async def scenario() -> None:
        pool, deadline = HostPool("host", 1), asyncio.get_running_loop().time() + WAIT_S
        assert await pool.run(lambda _check: 5, deadline) == 5
        with pytest.raises(BadVoxels):
            await pool.run(lambda _check: fail(), deadline)
        pool.close()

    asyncio.run(scenario())


def test_timeout_of_the_work_itself_is_no_missed_deadline() -> None:
    def work(_check: Callable[[], None]) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # As of a disk far away.

    async def scenario() -> None:
        pool, deadline = HostPool("host", 1), asyncio.get_running_loop().time() + WAIT_S
        with pytest.raises(TimeoutError, match="Connection timed out"):
            await pool.run(work, deadline)
        pool.close()

    asyncio.run(scenario())


def test_work_past_its_deadline_is_told_to_end() -> None:
    ended = threading.Event()

    def work(check_cancelled: Callable[[], None]) -> None:
        try:
            while not ended.wait(0.001):
                check_cancelled()
        except DeadlineExceeded:
            ended.set()
            raise

    async def scenario() -> None:
        pool = HostPool("host", 1)
        with pytest.raises(DeadlineExceeded, match="in time"):
            await pool.run(work, asyncio.get_running_loop().time() + 0.05)
        assert await asyncio.to_thread(ended.wait, WAIT_S)
        pool.close()

    asyncio.run(scenario())


def test_work_of_a_closed_pool_says_that_the_service_stops() -> None:
    async def scenario() -> None:
        pool, begun, go_on = HostPool("host", 1), threading.Event(), threading.Event()

        def work(_check: Callable[[], None]) -> int:
            begun.set()
            assert go_on.wait(WAIT_S)
            return 5

        deadline = asyncio.get_running_loop().time() + WAIT_S
        running = asyncio.create_task(pool.run(work, deadline))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        dropped, left = (asyncio.create_task(pool.run(work, deadline)) for _ in range(2))
        await asyncio.sleep(0)
        left.cancel()
        pool.close()
        late = asyncio.create_task(pool.run(work, deadline))
        for task in (dropped, late):
            with pytest.raises(Draining, match="before the service stopped"):
                await task
        # Who was cancelled stays so.
        with pytest.raises(asyncio.CancelledError):
            await left
        go_on.set()
        assert await running == 5

    asyncio.run(scenario())


def test_daemon_thread_hands_on_what_it_returns_or_raises() -> None:
    async def scenario() -> None:
        assert await run_in_daemon_thread(lambda: threading.current_thread().daemon)
        with pytest.raises(BadVoxels):
            await run_in_daemon_thread(fail)

    asyncio.run(scenario())


class Scan:
    """Something large."""


@pytest.mark.parametrize("ends", ["failed", "late", "waiting"])
def test_who_gets_no_result_is_freed_without_garbage_collection(ends: str) -> None:
    """Its memory is given to others as soon as it has ended; the collector may come much later."""
    pool, budget, held = HostPool("host", 1), FairBudget(1), Event()
    freed = Event()

    def work(_: object) -> int:
        return fail() if ends == "failed" else int(held.wait(WAIT_S))

    async def ask() -> object:
        scan = Scan()
        weakref.finalize(scan, freed.set)
        now = asyncio.get_running_loop().time()
        if ends == "waiting":
            return await budget.reserve(1, "b", now + 0.1), scan
        return await pool.run(work, now + (0.1 if ends == "late" else WAIT_S)), scan

    async def scenario() -> None:
        budget.add(1, "a")
        asked = asyncio.create_task(ask())
        await asyncio.wait([asked])
        assert isinstance(asked.exception(), BadVoxels | DeadlineExceeded)
        del asked
        held.set()
        assert freed.is_set()

    with closing(pool), without_garbage_collection():
        asyncio.run(scenario())
