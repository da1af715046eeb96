"""app/server."""
