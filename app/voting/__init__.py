"""app/voting."""
