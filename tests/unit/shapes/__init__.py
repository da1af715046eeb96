"""tests/unit/shapes."""
