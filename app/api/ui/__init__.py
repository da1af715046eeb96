"""app/api/ui."""
