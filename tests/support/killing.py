"""Processes that are killed between any two of their steps on files."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Final
from unittest import mock

STEPS: Final = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "ctypes.dlsym")
"""Audit events before such a step; the last is that of a call of the system by hand."""


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do work in a process that kills itself before one of its steps; return whether it did.

    Args:
        step: Which one, from 0; with more than there are, the work is done.
        work: To be done; it changes nothing but files.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status in {0, signal.SIGKILL}
        return status == signal.SIGKILL
    left = iter(range(step))

    def count() -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(descriptor: int, original: Callable[[int], None] = os.fsync) -> None:
        count()
        original(descriptor)

    sys.addaudithook(lambda event, _: count() if event in STEPS else None)
    try:
        with mock.patch.object(os, "fsync", fsync):
            work()
    finally:
        os._exit(0)
