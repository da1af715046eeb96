"""tests/unit/exchange."""
