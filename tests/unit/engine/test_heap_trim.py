"""Memory is given back after work."""

import asyncio
import sys

import pytest

from app.engine.heap_trim import Tidying, give_back_memory
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


async def _tidied(rest_s: float, work_s: float, work: int, pause_s: float) -> list[int]:
    """Work some times, with pauses, then rest; twice. Count the tidyings so far after each."""
    calls: list[str] = []
    tidying, counts = Tidying(rest_s, work_s, lambda: calls.append("tidy")), []
    for _ in range(2):
        for _ in range(work):
            tidying.after_work()
            await asyncio.sleep(pause_s)
        await asyncio.sleep(4 * rest_s)
        counts.append(len(calls))
    tidying.after_work()
    tidying.stop()
    await asyncio.sleep(4 * rest_s)
    assert len(calls) == counts[-1]
    return counts


def test_work_is_followed_by_one_tidying_and_rest_by_none() -> None:
    assert asyncio.run(_tidied(rest_s=0.2, work_s=60, work=5, pause_s=0.001)) == [1, 2]


def test_work_that_does_not_end_is_tidied_up_after_nevertheless() -> None:
    first, both = asyncio.run(_tidied(rest_s=0.2, work_s=0.1, work=50, pause_s=0.01))
    assert first >= 3
    assert both >= first + 3
