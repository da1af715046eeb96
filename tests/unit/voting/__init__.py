"""tests/unit/voting."""
