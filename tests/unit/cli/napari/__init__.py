"""tests/unit/cli/napari."""
