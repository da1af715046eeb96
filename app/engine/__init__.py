"""app/engine."""
