"""work beside a device's thread -> its outcome.

Scans are prepared in threads of their own, so that a small one waits neither for a huge one that is
being prepared nor for a batch. Where networks run on the host, landmarks are read off their votes
there as well; an accelerator's own thread does that in milliseconds.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeAlias, TypeVar

import torch

from app.worklist import Call, WorkList

Result = TypeVar("Result")

THREADS: Final = 4
"""So many huge scans must be in preparation at once for a small one to wait for them."""

ACCELERATOR_THREADS: Final = 2
"""One scan is read by the host while another is computed; more would share the device's memory."""

Then: TypeAlias = Callable[[Result | Exception], None]
"""Goes on with what a function returned, or raised."""


class Aside:
    """Threads beside the one of a device."""

    def __init__(self, work: WorkList, device: torch.device) -> None:
        """Begin with no thread.

        Args:
            work: What the device's thread has to do.
            device: That device.
        """
        self._work = work
        threads = THREADS if device.type == "cpu" else ACCELERATOR_THREADS
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="aside")

    def do(self, function: Callable[[], Result], then: Then[Result]) -> None:
        """Do some work aside.

        Args:
            function: The work.
            then: Is called in the same thread with what came of it.
        """
        # Refused once the device's thread has ended, which is on its way to all who wait.
        with suppress(RuntimeError):
            self._threads.submit(self._do, function, then)

    def close(self) -> None:
        """Let the threads end; what is not begun is not done any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _do(self, function: Callable[[], Result], then: Then[Result]) -> None:
        try:
            go_on(function, then)
        except BaseException as error:  # noqa: BLE001 - raised where it tells everybody who waits
            self._work.add_call(Call(_raiser(error)))


def go_on(function: Callable[[], Result], then: Then[Result]) -> None:
    """Call a function, and then another one with what it returned, or raised."""
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
