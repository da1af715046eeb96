"""app/training/evaluate."""
