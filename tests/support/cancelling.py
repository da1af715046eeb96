"""Work that nobody waits for any more."""

from collections.abc import Callable


class NobodyWaitsError(Exception):
    """Nobody waits."""


def cancelled_after(calls: int) -> Callable[[], None]:
    """Make a ``check_cancelled`` that raises ``NobodyWaitsError`` once it was called so often."""
    count = 0

    def check_cancelled() -> None:
        nonlocal count
        count += 1
        if count > calls:
            raise NobodyWaitsError

    return check_cancelled
