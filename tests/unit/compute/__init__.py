"""Tests of app.compute."""
