"""Loops in parallel."""

import pytest
import torch

from app.compute.threads import run_parts, split_range


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
