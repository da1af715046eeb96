"""Tests of the loops compiled for the CPU."""
