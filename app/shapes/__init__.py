"""Sets of landmarks, without their scans: fitted to each other, compared, averaged.

similarity    Umeyama's fit, the mean of many point sets
robust_shape  the median constellation, and each landmark's distance from it
symmetry      which landmarks are mirror images of each other
swaps         names of landmarks that look exchanged
"""

from app.shapes.robust_shape import RobustShape, estimate_robust_shape, fit_to
from app.shapes.similarity import (
    MIN_LANDMARKS,
    SCALE_BOUNDS,
    Similarity,
    fit_similarity,
    mean_shape,
)
from app.shapes.swaps import Labelling, find_swaps
from app.shapes.symmetry import find_partners

__all__ = [
    "MIN_LANDMARKS", "SCALE_BOUNDS", "Labelling", "RobustShape", "Similarity",
    "estimate_robust_shape", "find_partners", "find_swaps", "fit_similarity", "fit_to",
    "mean_shape",
]  # fmt: skip
