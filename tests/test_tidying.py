"""Memory is given back after work."""

import asyncio
import sys

import pytest

from app.tidying import Tidying, give_back_memory
from tests.benchmarks.linux import resident_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators are not asked")
def test_what_was_freed_between_what_is_in_use_is_given_back() -> None:
    give_back_memory()
    before = resident_bytes()
    # Larger than Python's own pools take, smaller than what the allocator maps one by one.
    blocks = [bytes(4000) for _ in range(50_000)]
    kept = blocks[::100]
    del blocks
    full = resident_bytes()
    give_back_memory()
    after = resident_bytes()
    assert len(kept) == 500
    assert after - before < 20 << 20
    assert full - after > 100 << 20


def test_work_is_followed_by_one_tidying_and_rest_by_none() -> None:
    async def work() -> list[int]:
        calls: list[str] = []
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def tidy() -> None:
            calls.append("tidy")
            loop.call_soon_threadsafe(done.set)

        tidying, counts = Tidying(0.01, tidy), []
        for _ in range(2):
            for _ in range(5):
                tidying.after_work()
            await done.wait()
            done.clear()
            await asyncio.sleep(0.05)
            counts.append(len(calls))
        tidying.after_work()
        tidying.stop()
        await asyncio.sleep(0.05)
        return [*counts, len(calls)]

    assert asyncio.run(work()) == [1, 2, 2]
