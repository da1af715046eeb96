"""app/preprocessing."""

from app.preprocessing.grid import Grid, find_window, foresee_shape, make_grid, normalise
from app.preprocessing.resampling import KERNEL_RADIUS_SIGMAS, apply_along, gaussians, resample
from app.preprocessing.tiling import Profiles, TilePlan, cut, load_profiles, plan_tiles, weigh

__all__ = [
    "KERNEL_RADIUS_SIGMAS",
    "Grid",
    "Profiles",
    "TilePlan",
    "apply_along",
    "cut",
    "find_window",
    "foresee_shape",
    "gaussians",
    "load_profiles",
    "make_grid",
    "normalise",
    "plan_tiles",
    "resample",
    "weigh",
]
