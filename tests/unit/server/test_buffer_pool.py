"""Memory for bodies: warm again and again, and never that of a body which is still in use."""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.upload.direct import fresh_buffer
from app.server.buffer_pool import GRAIN_BYTES, LEAST_BYTES, MIB, Buffers

ROOM = 64 * MIB


def place(view: memoryview) -> int:
    """Say where in memory a view begins."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(run())


@pytest.fixture
def buffers() -> Iterator[Buffers]:
    with asyncio.Runner() as runner:
        # Inside a running loop, as the server's protocol is.
        yield _OnLoop(runner)


class _OnLoop(Buffers):
    """Buffers whose calls are made on a loop."""

    def __init__(self, runner: asyncio.Runner) -> None:
        super().__init__(ROOM)
        self._runner = runner

    def reserve(self, length: int) -> memoryview:
        """Reserve on the loop."""

        async def on_loop() -> memoryview:
            return super(_OnLoop, self).reserve(length)

        return self._runner.run(on_loop())


def test_memory_is_used_again_once_it_is_free(buffers: Buffers) -> None:
    first = buffers.reserve(5 * MIB)
    where = place(first)
    del first
    again = buffers.reserve(6 * MIB)
    assert (place(again), len(again)) == (where, 6 * MIB)


def test_memory_in_use_is_not_given_to_another(buffers: Buffers) -> None:
    one, two = buffers.reserve(5 * MIB), buffers.reserve(5 * MIB)
    one[:], two[:] = b"1" * len(one), b"2" * len(two)
    assert set(one) == {ord("1")}
    assert set(two) == {ord("2")}


@pytest.mark.parametrize(
    "narrow",
    [
        lambda view: view[100:101],
        lambda view: view.cast("B")[3:].toreadonly(),
        lambda view: np.frombuffer(view, dtype=np.int16)[40:60:3],
        lambda view: np.asarray(view).view(np.int32).reshape(-1, 4)[1:2].T,
        lambda view: view.obj[7:9],
        lambda view: iter(view[5:]),
    ],
    ids=["slice", "read-only", "numpy", "reshaped", "of the owner", "iterator"],
)
def test_last_view_of_any_kind_keeps_memory_from_being_used_again(
    narrow: Callable[[memoryview], object], buffers: Buffers
) -> None:
    whole = buffers.reserve(5 * MIB)
    where = place(whole)
    part = narrow(whole)
    del whole
    assert place(buffers.reserve(5 * MIB)) != where
    assert buffers.lent_bytes >= 5 * MIB
    del part
    found = [buffers.reserve(5 * MIB) for _ in range(3)]
    assert where in [place(view) for view in found]


def test_memory_held_by_a_garbage_cycle_is_not_used_again(buffers: Buffers) -> None:
    view = buffers.reserve(5 * MIB)
    where = place(view)
    cycle: list[object] = [view]
    cycle.append(cycle)
    del view
    assert place(buffers.reserve(5 * MIB)) != where
    cycle.clear()
    assert where in [place(held) for held in [buffers.reserve(5 * MIB) for _ in range(3)]]


def test_memory_comes_back_from_another_thread(buffers: Buffers) -> None:
    held = [buffers.reserve(5 * MIB)]
    where = place(held[0])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(held.clear).result()
    assert place(buffers.reserve(5 * MIB)) == where


@given(
    steps=st.lists(
        st.tuples(st.integers(LEAST_BYTES - 1, 20 * MIB), st.integers(0, 5)), max_size=40
    )
)
def test_bodies_in_use_never_overlap_and_memory_stays_bounded(
    steps: list[tuple[int, int]],
) -> None:
    async def play() -> None:
        buffers = Buffers(ROOM)
        live: dict[int, memoryview] = {}
        for mark, (length, released) in enumerate(steps):
            live.pop(mark - 1 - released, None)
            view = buffers.reserve(length)
            view[:1], view[-1:] = bytes([mark]), bytes([mark])
            live[mark] = view
            assert len(view) == length
            assert buffers.lent_bytes + buffers.kept_bytes <= ROOM
            assert all(held[0] == held[-1] == whose for whose, held in live.items())
            spans = sorted((place(held), place(held) + len(held)) for held in live.values())
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))

    in_loop(play)


def test_what_does_not_fit_is_fresh_memory_and_not_kept(buffers: Buffers) -> None:
    held = [buffers.reserve(40 * MIB), buffers.reserve(40 * MIB), buffers.reserve(ROOM + 1)]
    assert buffers.lent_bytes == 40 * MIB
    held.clear()
    held.append(buffers.reserve(8 * MIB))
    assert (buffers.lent_bytes, buffers.kept_bytes) == (8 * MIB, 40 * MIB)


def test_memory_unused_for_longest_makes_room(buffers: Buffers) -> None:
    first, second = buffers.reserve(32 * MIB), buffers.reserve(32 * MIB)
    where = place(second)
    del first
    del second
    assert len(buffers.reserve(12 * MIB)) == 12 * MIB
    assert (buffers.lent_bytes, buffers.kept_bytes) == (12 * MIB, 32 * MIB)
    assert place(buffers.reserve(32 * MIB)) == where


def test_small_body_does_not_take_the_memory_of_a_large_one(buffers: Buffers) -> None:
    buffers.reserve(32 * MIB)
    small = buffers.reserve(2 * MIB)
    assert buffers.lent_bytes == GRAIN_BYTES
    assert len(small) == 2 * MIB
    assert buffers.kept_bytes == 32 * MIB


def test_tiny_body_is_left_to_the_allocator(buffers: Buffers) -> None:
    held = buffers.reserve(LEAST_BYTES - 1)
    assert (len(held), buffers.lent_bytes) == (LEAST_BYTES - 1, 0)


def test_memory_that_nobody_uses_goes_back_to_the_system_and_the_clock_stops() -> None:
    async def idle() -> None:
        loop = asyncio.get_running_loop()
        buffers = Buffers(ROOM, idle_s=0.01)
        view = buffers.reserve(5 * MIB)
        gone = asyncio.Event()
        owner = np.asarray(np.asarray(view).base.obj.base.obj)  # type: ignore[union-attr]
        weakref.finalize(owner, loop.call_soon_threadsafe, gone.set)
        del view
        del owner
        await gone.wait()
        assert (buffers.lent_bytes, buffers.kept_bytes) == (0, 0)
        assert len(asyncio.all_tasks()) == 1

    in_loop(idle)


def test_memory_in_use_outlives_the_idle_time() -> None:
    async def wait() -> None:
        buffers = Buffers(ROOM, idle_s=0.001)
        view = buffers.reserve(5 * MIB)
        view[:] = b"v" * len(view)
        ended = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, ended.set)
        await ended.wait()
        assert buffers.lent_bytes == 8 * MIB
        assert set(view) == {ord("v")}

    in_loop(wait)


def test_fresh_memory_has_the_length_that_was_asked_for() -> None:
    assert len(fresh_buffer(12_345)) == 12_345
