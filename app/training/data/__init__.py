"""app/training/data."""
