"""tests/unit/engine."""
