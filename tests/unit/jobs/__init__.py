"""Tests of app.jobs."""

from typing import Final

from app.io import Selection
from app.jobs import Order

ENOUGH: Final = 1 << 30
DAY_S: Final = 86_400.0


def order(owner: str = "anna") -> Order:
    """Make an order, whose values are not the defaults."""
    return Order(owner, "request", "model", "csv", candidates=True, selection=Selection(1, 2))
