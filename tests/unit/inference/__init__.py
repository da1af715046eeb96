"""tests/unit/inference."""
