"""tests/unit/compute."""
