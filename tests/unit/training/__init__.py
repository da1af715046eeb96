"""tests/unit/training."""
