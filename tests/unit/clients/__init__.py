"""tests/unit/clients."""
