"""app/voting/cpu."""
