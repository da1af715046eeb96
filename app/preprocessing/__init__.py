"""app/preprocessing."""
