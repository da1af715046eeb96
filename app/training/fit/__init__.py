"""app/training/fit."""
