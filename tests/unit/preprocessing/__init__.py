"""tests/unit/preprocessing."""
