"""app/voting/cuda."""
