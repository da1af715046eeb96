"""Loops in parallel, and cores that are shared."""

import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch

from app.compute.threads import SharedCores, _pool, run_split


def test_range_is_split_into_equal_parts_that_are_not_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts cover everything once, in order; a short range is one; torch says how many threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def parts(size: int) -> list[tuple[int, int]]:
        return run_split(lambda first, last: (first, last), size, 10)

    assert parts(100) == [(0, 25), (25, 50), (50, 75), (75, 100)]
    assert parts(25) == [(0, 12), (12, 25)]
    assert parts(5) == [(0, 5)]
    assert parts(0) == [(0, 0)]


@pytest.mark.parametrize("where", ["here", "another"])
def test_error_in_any_part_is_not_lost(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    both = threading.Barrier(2)

    def fail(first: int, last: int) -> None:
        del first, last
        both.wait(30)  # So that each part has a thread of its own.
        if (threading.current_thread() is threading.main_thread()) == (where == "here"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_split(fail, 2, 1)


def test_part_that_no_other_thread_has_begun_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a thread that is late."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    late = threading.Event()
    pool = _pool(os.getpid())
    blocked = [pool.submit(late.wait, 30) for _ in range(64)]  # More than it has threads.
    try:
        here = run_split(lambda _first, _last: threading.get_ident(), 2, 1)
        assert here == [threading.get_ident()] * 2
    finally:
        late.set()
        assert all(one.result() for one in blocked)


def test_loops_of_any_number_of_parts_share_the_threads_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pools for each number of parts would have thousands of threads on many cores."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    _pool.cache_clear()
    before = {*threading.enumerate()}
    try:
        for parts in (2, 3, 5, 12):
            meet = threading.Barrier(parts)  # So that each part has a thread of its own.
            run_split(partial(_meet, meet), parts, 1)
        assert len({*threading.enumerate()} - before) == 11
        lent = _pool(os.getpid())
    finally:
        _pool.cache_clear()
    lent.shutdown()


def test_loop_that_has_a_share_of_the_cores_leaves_others_the_threads_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first loop of a process may be that of a pass beside others."""
    here = threading.get_ident()
    monkeypatch.setattr(
        torch, "get_num_threads", lambda: 2 if threading.get_ident() == here else 12
    )
    _pool.cache_clear()
    before = {*threading.enumerate()}
    try:
        run_split(lambda first, last: (first, last), 2, 1)
        assert len({*threading.enumerate()} - before) == 11
        lent = _pool(os.getpid())
    finally:
        _pool.cache_clear()
    lent.shutdown()


def _meet(barrier: threading.Barrier, _first: int, _last: int) -> int:
    return barrier.wait(30)


FORKS = """
import os, threading, torch
from app.compute.threads import run_split
torch.set_num_threads(2)
both = threading.Barrier(2)
meet = lambda first, last: both.wait(30)  # So that each part has a thread of its own.
run_split(meet, 2, 1)
child = os.fork()
if child == 0:
    os._exit(0 if sorted(run_split(meet, 2, 1)) == [0, 1] else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_process_has_threads_of_its_own() -> None:
    """A pool of processes forks; here a small program does, as one with threads may block."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_passes_share_the_cores_and_the_clock_that_run_side_by_side() -> None:
    """One alone has all cores; the number for threads to come stays."""
    before = torch.get_num_threads()
    seen: dict[str, list[int]] = {"first": [], "second": []}
    first_ran, second_ran, second_ended = (threading.Event() for _ in range(3))

    def first(cores: SharedCores) -> None:
        with cores.share():
            seen["first"].append(torch.get_num_threads())
            first_ran.set()
            assert second_ran.wait(30)
            cores.adopt_share()
            seen["first"].append(torch.get_num_threads())
            start_s, start_used_s = time.perf_counter(), cores.used_s
            time.sleep(0.2)
            used_s = cores.used_s - start_used_s
            assert used_s == pytest.approx((time.perf_counter() - start_s) / 2, rel=0.1)
            second_ended.set()
            threads[1].join()
            cores.adopt_share()
            seen["first"].append(torch.get_num_threads())

    def second(cores: SharedCores) -> None:
        assert first_ran.wait(30)
        with cores.share():
            seen["second"].append(torch.get_num_threads())
            second_ran.set()
            assert second_ended.wait(30)

    torch.set_num_threads(4)
    try:
        cores = SharedCores()
        threads = [threading.Thread(target=one, args=[cores]) for one in (first, second)]
        for thread in threads:
            thread.start()
        threads[0].join()
        newest: list[int] = []
        third = threading.Thread(target=lambda: newest.append(torch.get_num_threads()))
        third.start()
        third.join()
    finally:
        torch.set_num_threads(before)
    assert seen == {"first": [4, 2, 4], "second": [2]}
    assert newest == [4]
