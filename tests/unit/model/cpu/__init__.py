"""tests/unit/model."""
