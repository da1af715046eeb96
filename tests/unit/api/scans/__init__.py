"""Tests of app.api.scans."""
