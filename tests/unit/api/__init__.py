"""tests/unit/api."""
