"""Tests of app.voting."""
