"""app/model."""
