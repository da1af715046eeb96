"""app/compute."""
