"""Sets of landmarks, without their scans: fitted to each other, compared, averaged.

similarity    Umeyama's fit, the mean of many point sets
registration  landmarks of two scans -> the transform between them, and its file
robust_shape  the median constellation, and each landmark's distance from it
symmetry      which landmarks are mirror images of each other
swaps         names of landmarks that look exchanged

cohort              landmark files of many specimens -> one array
morphometric_files  a cohort -> TPS, Morphologika, NTS, CSV
procrustes          a cohort -> shapes, their mean and principal components
outliers            a cohort -> points that are unlike the others'
shape_report        all that on one page
"""

from app.shapes.cohort import Cohort, read_cohort
from app.shapes.morphometric_files import COHORT_FORMATS
from app.shapes.outliers import find_outliers
from app.shapes.procrustes import analyse_shapes
from app.shapes.registration import Registration, register
from app.shapes.robust_shape import RobustShape, estimate_robust_shape
from app.shapes.shape_report import write_shape_report
from app.shapes.similarity import (
    MIN_COMMON,
    MIN_LANDMARKS,
    SCALE_BOUNDS,
    Similarity,
    fit_similarity,
    mean_shape,
    measure_stretch,
    measure_twist,
)
from app.shapes.swaps import Labelling, find_swaps
from app.shapes.symmetry import find_partners

__all__ = [
    "COHORT_FORMATS", "MIN_COMMON", "MIN_LANDMARKS", "SCALE_BOUNDS", "Cohort", "Labelling",
    "Registration", "RobustShape", "Similarity", "analyse_shapes",
    "estimate_robust_shape", "find_outliers", "find_partners", "find_swaps", "fit_similarity",
    "mean_shape", "measure_stretch", "measure_twist", "read_cohort", "register",
    "write_shape_report",
]  # fmt: skip
