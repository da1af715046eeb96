"""Tests of landmarkd; they mirror ``app/``."""
