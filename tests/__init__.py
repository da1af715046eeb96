"""Tests of landmarkd, one file per module."""

from tests.array_types import checked

__all__ = ["checked"]
