"""work in parts -> the parts done side by side, by code that does not hold Python's lock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Outcome = TypeVar("Outcome")


def share_out(amount: int, least: int) -> list[int]:
    """Cut work into as many equal parts as torch may use threads, none of them too small.

    Args:
        amount: How much there is to do.
        least: Less is not worth a thread of its own.

    Returns:
        Where each part begins, and where the last one ends.
    """
    parts = max(1, min(torch.get_num_threads(), amount // least))
    return [amount * part // parts for part in range(parts + 1)]


def for_parts(work: Callable[[int], Outcome], parts: int) -> list[Outcome]:
    """Do some work for each part, the first one here, each other in a thread of its own.

    Args:
        work: Takes the number of a part, from 0.
        parts: How many.

    Returns:
        What it returned for each part.
    """
    if parts == 1:
        return [work(0)]
    others = [_pool(parts - 1).submit(work, part) for part in range(1, parts)]
    return [work(0), *(other.result() for other in others)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Keep threads for parts: to start one takes longer than many a part."""
    return ThreadPoolExecutor(threads, thread_name_prefix="parts")
