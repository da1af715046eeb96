"""tests/unit/io."""
