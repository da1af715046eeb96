"""tests/integration/page."""
