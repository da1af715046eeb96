"""Scans as networks take them: in their axes, spacing and intensities, tile by tile.

grid        Volume -> Grid: axes, spacing and intensities
intensity   voxel values as the network's rule wants them
posed_grid  Volume + Pose -> Grid: in the coordinate frame of a mean shape
resampling  one spacing to another, along the axes
sampling    values at any place between voxels
smoothing   as blurred as a coarser grid shows it
splines     one spacing to another, as nnU-Net does it
tiling      Grid -> tiles, and how much each of their voxels counts
"""

from app.preprocessing.grid import Grid, ScanExtent, crop, find_blank, grid_shape, make_grid, trim
from app.preprocessing.intensity import find_window, normalise_, width_of
from app.preprocessing.posed_grid import (
    Pose,
    index_grid,
    make_posed_grid,
    reorient_grid,
    turn_upside_down,
)
from app.preprocessing.resampling import resample
from app.preprocessing.sampling import sample_at
from app.preprocessing.smoothing import smooth, smooth_for
from app.preprocessing.tiling import (
    Profiles,
    TilePlan,
    count_tiles,
    extract_tile,
    load_profiles,
    plan_tiles,
    tile_weights,
    within_grid,
)

__all__ = [
    "Grid", "Pose", "Profiles", "ScanExtent", "TilePlan",
    "count_tiles", "crop", "extract_tile", "find_blank", "find_window", "grid_shape",
    "index_grid", "load_profiles", "make_grid", "make_posed_grid", "normalise_", "plan_tiles",
    "reorient_grid", "resample", "sample_at", "smooth", "smooth_for", "tile_weights",
    "trim", "turn_upside_down", "width_of", "within_grid",
]  # fmt: skip
