"""app/inference."""
