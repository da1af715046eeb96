"""landmarkd."""
