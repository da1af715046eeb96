"""How many threads an operation uses, and loops in parallel, in threads that release the GIL."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar, cast

import torch
from threadpoolctl import ThreadpoolController

from app.compute.device import core_limit
from app.errors import StartupError

Result = TypeVar("Result")


def limit_threads(threads: int) -> None:
    """Let torch use so many threads; 0: as many as it chooses, but no more than there is time for.

    It counts cores. Where their time is limited, more threads use up that of a period at its start,
    and then all of them stand still until the next. Those for parts of loops start here.

    Raises:
        StartupError: As ``start_executor``.
    """
    allowed = core_limit()
    if threads or allowed < torch.get_num_threads():
        torch.set_num_threads(threads or math.ceil(allowed))
    if torch.get_num_threads() > 1:
        _pool(os.getpid())


def adopt_thread_limit() -> None:
    """Let torch use in this new thread as many threads as ``torch.set_num_threads`` allowed.

    Until a thread asks for their number, matrix products and convolutions in it use all cores, and
    products then sum in another order: its first scan would differ a little from all others.
    """
    torch.get_num_threads()


def start_executor(name: str, threads: int) -> ThreadPoolExecutor:
    """Start all threads of an executor: where a limit lets no more start later, nothing is lost.

    An executor that starts a thread when it is needed keeps what it has no thread for in its queue.

    Raises:
        StartupError: The system lets none start.
    """
    executor = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=adopt_thread_limit)
    started = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):  # Each waits on a thread of its own until all have started.
            executor.submit(started.wait)
    except RuntimeError as error:
        started.abort()
        executor.shutdown(wait=False, cancel_futures=True)
        raise StartupError(
            f"expected a system that lets {threads} threads start for {name}, got: {error}; "
            "allow more processes and threads"
        ) from error
    started.wait()
    return executor


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        StartupError: The system lets none start.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise StartupError(
            f"expected a system that lets a thread start for {thread.name}, got: {error}; "
            "allow more processes and threads"
        ) from error


class SharedCores:
    """The cores of a CPU, of which passes and other work that run at once have equal shares."""

    def __init__(self) -> None:
        """Share as many cores as operations in this thread may use."""
        self.cores = torch.get_num_threads()
        # Of the calling thread alone; torch.set_num_threads is also for all threads to come.
        self._openmp = ThreadpoolController().select(user_api="openmp")
        self._lock = threading.Lock()
        self._passes = self._threads = 0
        self._used_s, self._since_s = 0.0, time.perf_counter()

    @contextmanager
    def share(self, *, passes: int = 1) -> Iterator[None]:
        """Run a forward pass in this thread, or other work, with its share of the cores."""
        self._count(passes, 1)
        self.adopt_share()
        try:
            yield
        finally:
            self._count(-passes, -1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave this thread's share to the others meanwhile."""
        self._count(-1, -1)
        try:
            yield
        finally:
            self._count(1, 1)

    def adopt_share(self) -> None:
        """Have operations in this thread use its share, once more or fewer passes run."""
        threads = max(1, self.cores // max(1, self._threads))
        if threads != torch.get_num_threads():
            self._openmp.limit(limits=threads)

    @property
    def used_s(self) -> float:
        """A clock of which each second counts as much as a pass had of the cores in it."""
        with self._lock:
            return self._used_until(time.perf_counter())

    def _count(self, passes: int, threads: int) -> None:
        with self._lock:
            now = time.perf_counter()
            self._used_s, self._since_s = self._used_until(now), now
            self._passes += passes
            self._threads += threads

    def _used_until(self, now: float) -> float:
        return self._used_s + (now - self._since_s) / max(1, self._passes)


def run_split(function: Callable[[int, int], Result], size: int, min_part: int) -> list[Result]:
    """Call a function for parts of a range, in as many threads as torch may use, this one included.

    A thread that has done its part takes one that no other has begun, and none of these is waited
    for: on busy cores they may be late.

    Args:
        function: Given where a part begins and ends.
        size: Length of the range.
        min_part: A shorter part is not worth a thread of its own.

    Returns:
        What the function returns for each part, in their order.
    """
    parts = max(1, min(torch.get_num_threads(), size // min_part))
    if parts == 1:
        return [function(0, size)]
    results: list[Result | None] = [None] * parts
    left = iter(range(parts))

    def work() -> None:
        for part in left:
            results[part] = function(size * part // parts, size * (part + 1) // parts)

    others = [_pool(os.getpid()).submit(work) for _ in range(parts - 1)]
    try:
        work()
    finally:
        begun = [other for other in others if not other.cancel()]
    for other in begun:
        other.result()
    return cast("list[Result]", results)


@cache
def _pool(_process: int) -> ThreadPoolExecutor:
    """Keep the threads of a process: to start one takes longer than many a part.

    They are as many as all parts at once can use, not as the parts of the loop that comes first: on
    many cores, pools for each number of parts would have thousands. A fork has none of its
    parent's, and what were left to these would stay in memory for good.
    """
    with ThreadPoolExecutor(1) as new:  # In this thread, it may be a share of the cores.
        threads = new.submit(torch.get_num_threads).result()
    return start_executor("parts", max(1, threads - 1))
