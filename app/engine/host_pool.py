"""work beside a device's thread -> its outcome.

Scans are prepared in threads of their own, so that a small one waits neither for a huge one that is
being prepared nor for a batch; landmarks are read off their votes there as well.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeAlias, TypeVar

from app.engine.work_queue import Call, WorkList

Result = TypeVar("Result")

THREADS: Final = 4
"""So many huge scans must be in preparation at once for a small one to wait for them."""

Then: TypeAlias = Callable[[Result | Exception], None]
"""Goes on with what a function returned, or raised."""


class Aside:
    """Threads beside the one of a device."""

    def __init__(self, work: WorkList) -> None:
        """Begin with no thread; the work list is that of the device's own."""
        self._work = work
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")

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
        outcome: Result | Exception
        try:
            try:
                outcome = function()
            except Exception as error:  # noqa: BLE001 - handed on
                outcome = error
            then(outcome)
        except BaseException as error:  # noqa: BLE001 - raised where it tells everybody who waits
            self._work.add_call(Call(_raiser(error)))


def _raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
