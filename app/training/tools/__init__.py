"""app/training/tools."""
