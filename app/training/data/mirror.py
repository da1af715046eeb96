"""Mirror images of specimens.

A scan and its mirror image are two subjects to train on, if left and right landmarks swap their
names.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int64

from app.errors import BadParameter
from app.geometry import Points
from app.shapes import MIN_LANDMARKS, find_partners
from app.training.data.specimens import Specimen


def mirror(specimen: Specimen, partners: Int64[np.ndarray, " landmarks"]) -> Specimen:
    """Return the mirror image of a specimen; it shares the voxels.

    Returns:
        The scan with its world's x axis reversed; landmarks without a partner are NaN, and not
        absent: the image may show them, where nobody has placed anything.
    """
    flip = np.diag([-1.0, 1.0, 1.0, 1.0])
    points = specimen.points[partners] * (-1.0, 1.0, 1.0)
    points[partners < 0] = np.nan
    absent = frozenset(np.flatnonzero(np.isin(partners, list(specimen.absent))).tolist())
    to_world = flip @ specimen.to_world
    return replace(specimen, to_world=to_world, points=points, absent=absent)


def with_mirror_images(specimens: Sequence[Specimen], mean: Points | None) -> tuple[Specimen, ...]:
    """Add the mirror image of every specimen.

    Raises:
        BadParameter: There is no mean shape, or it is not symmetric.
    """
    if mean is None:
        raise BadParameter(f"--mirror: expected at least {MIN_LANDMARKS} landmarks, got fewer")
    partners = find_partners(mean)
    if partners is None:
        raise BadParameter(
            "--mirror: expected landmarks that are alike on both sides, found no symmetry"
        )
    return (*specimens, *(mirror(specimen, partners) for specimen in specimens))
