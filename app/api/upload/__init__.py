"""app/api/upload."""
