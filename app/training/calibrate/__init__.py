"""app/training/calibrate."""
