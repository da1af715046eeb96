"""Tests of landmarkd, one file per module."""

from tests.support.array_types import checked

__all__ = ["checked"]
