"""Tests of app.jobs."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from app.io import Selection
from app.jobs import Order, folder

ENOUGH: Final = 1 << 30
DAY_S: Final = 86_400.0
MODEL: Final = "model"


def order(owner: str = "anna", model: str = MODEL) -> Order:
    """Make an order, whose values are not the defaults."""
    return Order(owner, "request", model, "csv", candidates=True, selection=Selection(1, 2))


def opened_databases(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Note the databases that are opened from now on."""
    opened = list[sqlite3.Connection]()
    connect = sqlite3.connect

    def open_database(*args: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", open_database)
    return opened


def pass_time(monkeypatch: pytest.MonkeyPatch, until_s: float) -> None:
    """Let it be another time, without that anybody has set the clock."""
    elapsed_s = folder.elapsed_s() + until_s - time.time()
    monkeypatch.setattr(time, "time", lambda: until_s)
    monkeypatch.setattr(folder, "elapsed_s", lambda: elapsed_s)


@contextmanager
def full_disk(database: sqlite3.Connection) -> Iterator[None]:
    """Let the disk take nothing from the next file on, neither files nor rows."""

    def fail(_: int) -> None:
        database.execute("PRAGMA query_only = ON")
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield
    database.execute("PRAGMA query_only = OFF")
