"""Free memory is returned to the OS after work."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from app.compute.heap_trim import HeapTrimmer, trim_heap
from tests.benchmarks.linux import resident_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators are not asked")
def test_free_memory_between_blocks_in_use_is_returned() -> None:
    trim_heap()
    before = resident_bytes()
    # Larger than Python's own pools take, smaller than what the allocator maps one by one.
    blocks = [bytes(4000) for _ in range(50_000)]
    kept = blocks[::100]
    del blocks
    full = resident_bytes()
    trim_heap()
    after = resident_bytes()
    assert len(kept) == 500
    assert after - before < 20 << 20
    assert full - after > 100 << 20


HEAPS_OF_THREADS = """
import ctypes
import threading
from app.compute import limit_heaps

limit_heaps()
libc, started = ctypes.CDLL(None), threading.Barrier(9)


def allocate():
    libc.malloc(1000)
    started.wait()


for _ in range(8):
    threading.Thread(target=allocate).start()
started.wait()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators are not asked")
def test_threads_share_two_heaps() -> None:
    # In a process of its own: here, there are more already.
    done = subprocess.run(
        [sys.executable, "-c", HEAPS_OF_THREADS],
        cwd=Path(__file__).resolve().parents[3],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("<heap nr=") == 2


async def _trims(work: int, pause_s: float) -> list[int]:
    """Work some times, with pauses, then rest; twice. Count the trims so far after each."""
    calls: list[str] = []
    trimmer, counts = HeapTrimmer(lambda trim: trim(), 0.1, lambda: calls.append("trim")), []
    for _ in range(2):
        for _ in range(work):
            trimmer.schedule()
            await asyncio.sleep(pause_s)
        await asyncio.sleep(0.8)
        counts.append(len(calls))
    trimmer.schedule()
    trimmer.stop()
    await asyncio.sleep(0.8)
    assert len(calls) == counts[-1]
    return counts


def test_work_is_followed_by_one_trim_and_rest_by_none() -> None:
    assert asyncio.run(_trims(work=5, pause_s=0.001)) == [1, 2]


def test_heap_is_trimmed_while_work_goes_on() -> None:
    first, both = asyncio.run(_trims(work=50, pause_s=0.01))
    assert first >= 3
    assert both >= first + 3
