"""What all tests here share: coverage is off."""

import pytest


@pytest.fixture(autouse=True)
def _uncovered(no_cover: None) -> None:
    """Coverage is that of unit tests: what runs services and measures is slower under it."""
