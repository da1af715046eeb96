"""Scans as networks take them: in their axes, spacing and intensities, tile by tile.

grid        Volume -> Grid: axes, spacing and intensities
resampling  one spacing to another, along the axes
tiling      Grid -> tiles, and how much each of their voxels counts
"""

from app.preprocessing.grid import Grid, find_window, grid_shape, make_grid, normalise
from app.preprocessing.resampling import KERNEL_RADIUS_SIGMAS, apply_along, gaussians, resample
from app.preprocessing.tiling import (
    Profiles,
    TilePlan,
    extract_tile,
    load_profiles,
    plan_tiles,
    tile_weights,
)

__all__ = [
    "KERNEL_RADIUS_SIGMAS",
    "Grid",
    "Profiles",
    "TilePlan",
    "apply_along",
    "extract_tile",
    "find_window",
    "gaussians",
    "grid_shape",
    "load_profiles",
    "make_grid",
    "normalise",
    "plan_tiles",
    "resample",
    "tile_weights",
]
