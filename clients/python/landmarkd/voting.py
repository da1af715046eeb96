"""Landmarks, rows and heatmaps from the output of a network that runs elsewhere; with PyTorch."""

from app.voting import (
    GridFrame,
    LandmarkSpec,
    Layout,
    Readout,
    aggregate,
    filter_rows,
    filter_votes,
    locate,
    make_field,
)

__all__ = [
    "GridFrame", "LandmarkSpec", "Layout", "Readout", "aggregate", "filter_rows", "filter_votes",
    "locate", "make_field",
]  # fmt: skip
