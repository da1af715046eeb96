"""Tests of app.jobs."""
