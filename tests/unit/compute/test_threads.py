"""Loops in parallel, and cores that are shared."""

import threading
import time

import pytest
import torch

from app.compute.threads import SharedCores, run_parts, split_range


def test_range_is_split_into_equal_parts_that_are_not_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts cover everything once; a short range is one part; torch decides how many threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert split_range(100, 10) == [0, 25, 50, 75, 100]
    assert split_range(25, 10) == [0, 12, 25]
    assert split_range(5, 10) == [0, 5]
    assert split_range(0, 10) == [0, 0]


def test_parts_come_back_in_their_order_and_an_error_is_not_lost() -> None:
    """The first is done here, the others in threads."""
    assert run_parts(lambda part: part * part, 5) == [0, 1, 4, 9, 16]
    with pytest.raises(ZeroDivisionError):
        run_parts(lambda part: 1 // (part - 1), 2)


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
