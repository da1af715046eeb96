"""What all tests here share: coverage is off."""

import pytest


@pytest.fixture(autouse=True)
def _uncovered(no_cover: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - it acts by being there
    """Coverage is that of unit tests: what runs services and measures is slower under it."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
