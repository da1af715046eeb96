"""function -> compiled function, and work in parts."""

from collections.abc import Callable

import pytest
import torch

from app.compute.jit import numba_jit
from app.compute.threads import run_parts, split_range
from app.inference.precompile import compile_loops


def test_loops_run_where_nothing_can_be_kept() -> None:
    """Code without a file has no folder beside it: numba refuses to keep it, and it runs anyway."""
    namespace: dict[str, Callable[[int, int], int]] = {}
    exec("def add(a, b):\n    return a + b", namespace)  # noqa: S102 - the only way to have no file
    assert numba_jit(namespace["add"])(1, 2) == 3


def test_loops_can_be_compiled_ahead() -> None:
    """What installing runs."""
    compile_loops()


def test_work_is_cut_into_equal_parts_that_are_not_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts cover everything once; little work is one part; torch says how many threads."""
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
