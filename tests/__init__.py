"""Tests of landmarkd; each module of the package has one of the same name here."""
