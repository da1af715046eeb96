"""tests/unit/cli."""
