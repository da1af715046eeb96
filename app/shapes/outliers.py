"""A cohort -> points and specimens that are unlike the others, and names that look exchanged.

The median constellation is fitted robustly, so that a wrong point shows where it lies, and does not
drag the points around it along, as it does in least squares.
"""

from dataclasses import dataclass

import numpy as np

from app.shapes.cohort import Cohort
from app.shapes.robust_shape import estimate_robust_shape
from app.shapes.swaps import Labelling, find_swaps


@dataclass(frozen=True, slots=True)
class Outlier:
    """What is unlike the others in one specimen.

    Attributes:
        specimen: Its name.
        swaps: Names that look exchanged, in words.
        misplaced: Distance of other points from where the specimen's remaining points and the other
            specimens put them, over the limit for that point, by name; above 1, largest first.
        distance_mm: The same distances, in mm.
    """

    specimen: str
    swaps: tuple[str, ...]
    misplaced: dict[str, float]
    distance_mm: dict[str, float]


def find_outliers(cohort: Cohort) -> list[Outlier] | None:
    """Find what is unlike the others.

    Returns:
        The specimens in which something is, those with exchanged names and then those with the most
        distant points first. None where the specimens have no constellation in common to be
        compared with.
    """
    shape = estimate_robust_shape(list(cohort.points))
    if shape is None or not shape.consistent:
        return None
    # Of one size, as the points of large specimens lie farther off in mm.
    scale = np.where(shape.usable, shape.fits.scale, np.nan)
    points = cohort.points * scale[:, None, None]
    shape = estimate_robust_shape(list(points)) or shape
    outliers = []
    for row in np.flatnonzero(shape.usable).tolist():
        swaps = find_swaps(Labelling(points[row], shape.residual_mm[row]), shape)
        share = swaps.labelling.residual_mm / shape.limit_mm
        distance = swaps.labelling.residual_mm / scale[row]
        worst = [index for index in np.argsort(-share).tolist() if share[index] > 1]
        names = [cohort.landmarks[index] for index in swaps.given.tolist()]  # None has index -1.
        named = tuple(swaps.describe(cohort.landmarks))
        if worst or named:
            outliers.append(
                Outlier(
                    specimen=cohort.specimens[row],
                    swaps=named,
                    misplaced={names[index]: float(share[index]) for index in worst},
                    distance_mm={names[index]: float(distance[index]) for index in worst},
                )
            )
    return sorted(
        outliers, key=lambda one: (not one.swaps, -max(one.misplaced.values(), default=0))
    )
