"""How many threads an operation uses, and loops in parallel, in threads that release the GIL."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


def adopt_thread_limit() -> None:
    """Let torch use in this new thread as many threads as ``torch.set_num_threads`` allowed.

    Until a thread asks for their number, matrix products and convolutions in it use all cores, and
    products then sum in another order: its first scan would differ a little from all others.
    """
    torch.get_num_threads()


def split_range(size: int, min_part: int) -> list[int]:
    """Split a range into as many equal parts as torch may use threads, none of them too small.

    Args:
        size: Length of the range.
        min_part: A shorter part is not worth a thread of its own.

    Returns:
        Where each part begins, and where the last one ends.
    """
    parts = max(1, min(torch.get_num_threads(), size // min_part))
    return [size * part // parts for part in range(parts + 1)]


def run_parts(function: Callable[[int], Result], parts: int) -> list[Result]:
    """Call a function with each part's number, the first in this thread, the others in a pool."""
    if parts == 1:
        return [function(0)]
    others = [_pool(parts - 1).submit(function, part) for part in range(1, parts)]
    return [function(0), *(other.result() for other in others)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Keep the threads: to start one takes longer than many a part."""
    return ThreadPoolExecutor(threads, thread_name_prefix="parts")
