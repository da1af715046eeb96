"""work of the host -> its outcome: what is done beside a device's thread.

Where networks run on an accelerator, its thread also prepares scans and reads landmarks there,
which takes milliseconds. Where they run on the host, both are done in threads of their own, so that
a small scan waits neither for a huge one that is being prepared nor, at either end, for a batch.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeAlias, TypeVar

import torch

from app.worklist import Call, WorkList

Result = TypeVar("Result")

THREADS: Final = 4
"""So many huge scans must be in preparation at once for a small one to wait for them."""

Then: TypeAlias = Callable[[Result | Exception], None]
"""Goes on with what a function returned, or raised."""


class Aside:
    """Threads beside the one of a device."""

    def __init__(self, work: WorkList, on_busy: Callable[[float], None]) -> None:
        """Begin with no thread.

        Args:
            work: What the device's thread has to do.
            on_busy: Is told the seconds of what that thread does here.
        """
        self._work = work
        self._on_busy = on_busy
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")

    def do(self, device: torch.device, function: Callable[[], Result], then: Then[Result]) -> None:
        """Do some work aside if the host does it anyway, else here, on the device's thread.

        Args:
            device: Where the work is done.
            function: The work.
            then: Is called in the same thread with what came of it.
        """
        if device.type == "cpu":
            # Refused once the device's thread has ended, which is on its way to all who wait.
            with suppress(RuntimeError):
                self._threads.submit(self._do, function, then)
            return
        start = time.perf_counter()
        try:
            _go_on(function, then)
        finally:
            self._on_busy(time.perf_counter() - start)

    def close(self) -> None:
        """Let the threads end; what is not begun is not done any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _do(self, function: Callable[[], Result], then: Then[Result]) -> None:
        try:
            _go_on(function, then)
        except BaseException as error:  # noqa: BLE001 - raised where it tells everybody who waits
            self._work.add_call(Call(_raiser(error)))


def _go_on(function: Callable[[], Result], then: Then[Result]) -> None:
    outcome: Result | Exception
    try:
        outcome = function()
    except Exception as error:  # noqa: BLE001 - handed on
        outcome = error
    then(outcome)


def _raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
