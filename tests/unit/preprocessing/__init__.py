"""Tests of app.preprocessing."""
