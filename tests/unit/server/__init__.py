"""tests/unit/server."""
