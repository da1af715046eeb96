"""Planes -> an ordered stack of them, with its affine.

Images are sorted along their normal; numbers that scanners and archives give them are not believed.
The step from one to the next is the mean of all, so that a tilted gantry becomes a sheared affine,
which is exact. What is no stack of equal steps is refused: a gap would shift all that lies behind.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64

from app.errors import BadGeometry
from app.geometry import LPS_FROM_RAS, Affine, Points
from app.io.dicom.image import Plane
from app.io.header import MIN_SPACING_MM, by_axis, make_affine

UNIT_TOLERANCE: Final = 1e-3
"""Of directions, which are written with 6 digits or so."""

MAX_DEVIATION: Final = 0.05
"""Of an image from its place in a stack of equal steps: along the normal in steps, beside it in the
smallest spacing of pixels."""

ROUNDING_MM: Final = 0.11
"""Deviation along the normal that is allowed up to the share below. Positions with one decimal are
up to 0.1 mm off a line from the first to the last, as all three are rounded."""

MAX_ROUNDING: Final = 0.25
"""Share of the step up to which that is allowed."""

MISSING: Final = 1 / 3
"""Of the mean step: how far off at least one image is, where another is missing."""

MISSING_OF_FOUR: Final = 1 / 4
"""The same of four images, such as those at 0, 1, 3 and 4."""

DECIMALS: Final = (1, 2, 3)
"""With which positions may be written so that their rounding matters."""

SAME_PLACE: Final = 1e-3
"""Of the step between images: nearer ones are at one place."""

TILT_DEGREES: Final = 0.1
"""Between step and normal; less is rounding."""


def stack_planes(planes: Sequence[Plane]) -> tuple[tuple[Plane, ...], Affine, list[str]]:
    """Sort planes of one orientation, one at least, along their normal.

    Returns:
        The planes in order; voxel index -> mm, RAS; and warnings.

    Raises:
        BadGeometry: They are no stack of equal steps, or lie nowhere.
    """
    first = planes[0]
    along_row, along_column, normal = _directions(first)
    positions = np.array([plane.position for plane in planes])
    if np.abs(positions).max() > 1e9:
        raise BadGeometry("expected finite positions of images, got others")
    heights = positions @ normal
    order = np.argsort(heights, kind="stable")
    positions, heights = positions[order], heights[order]
    row_step, column_step = first.spacing[1] * along_row, first.spacing[0] * along_column
    warnings: list[str] = []
    if len(planes) == 1:
        thickness = first.thickness or 0.0
        if not thickness > 0:
            thickness = 1.0
            warnings.append("the file does not say how thick its slice is; 1 mm was assumed")
        step = thickness * normal
    else:
        rounding = _last_decimal(positions)
        step = _step(positions, normal, min(first.spacing), rounding)
        along = float(step @ normal)
        beside = float(np.linalg.norm(step - along * normal))
        tilt = math.degrees(math.atan2(beside, along))
        # Each coordinate of the first and of the last position may be rounded the other way.
        if tilt > TILT_DEGREES and beside * (len(planes) - 1) > math.sqrt(3) * rounding:
            warnings.append(
                f"the images are shifted against each other by {tilt:.1f} degrees (gantry tilt); "
                "the affine is sheared by as much"
            )
    affine = make_affine(LPS_FROM_RAS, np.stack([row_step, column_step, step, positions[0]]))
    return tuple(planes[at] for at in order), affine, warnings


def _directions(plane: Plane) -> Float64[np.ndarray, "3 3"]:
    """Return the directions along a row, along a column, and of the normal."""
    along_row, along_column = np.array(plane.orientation[:3]), np.array(plane.orientation[3:])
    lengths = np.linalg.norm(along_row), np.linalg.norm(along_column)
    if not (
        np.allclose(lengths, 1, rtol=0, atol=UNIT_TOLERANCE)
        and abs(along_row @ along_column) <= UNIT_TOLERANCE
    ):
        raise BadGeometry(
            "expected ImageOrientationPatient of perpendicular unit vectors, got others"
        )
    if min(plane.spacing) <= 0:
        raise BadGeometry(f"expected a positive PixelSpacing, got {by_axis(plane.spacing)} mm")
    normal = np.cross(along_row, along_column)
    return np.stack([along_row, along_column, normal / np.linalg.norm(normal)])


def _step(
    positions: Points, normal: Float64[np.ndarray, " 3"], spacing: float, rounding: float
) -> Float64[np.ndarray, " 3"]:
    """Return the step from one image to the next, from sorted positions in equal steps.

    It leads from the first to the last, so that their rounding does not add up over the stack.
    """
    heights = positions @ normal
    steps = np.diff(heights)
    usual = float(np.median(steps))
    same = steps <= max(SAME_PLACE * usual, MIN_SPACING_MM)
    count = len(positions)
    if same.any():
        raise BadGeometry(
            f"expected one image at each place, got 2 or more at some ({count} images at "
            f"{count - same.sum()} places), the first at {heights[int(same.argmax())]:.6g} mm "
            "along the normal; is it a 4D series, or is a file there twice?"
        )
    step = np.asarray((positions[-1] - positions[0]) / (count - 1))
    offsets = positions - positions[0] - np.arange(count)[:, None] * step
    along = offsets @ normal
    beside = np.linalg.norm(offsets - along[:, None] * normal, axis=1)
    mean = (heights[-1] - heights[0]) / (count - 1)
    # Of oblique images three rounded coordinates add up; one that is missing must not hide in that.
    along_rounding = rounding * float(np.abs(normal).sum())
    missing = MISSING_OF_FOUR if count == 4 else MISSING
    allowed = max(
        min(max(MAX_DEVIATION * mean, ROUNDING_MM), MAX_ROUNDING * mean),
        min(along_rounding, missing * mean - along_rounding),
    )
    worst = int(np.abs(steps - usual).argmax())
    unevenness = abs(steps[worst] - usual)
    # Rounding may put few images back in line though one is missing, but makes no step of two.
    if (
        np.abs(along).max() <= allowed
        and unevenness <= 2 * allowed
        and (beside.max() <= MAX_DEVIATION * spacing or np.abs(offsets).max() <= rounding < allowed)
    ):
        return step
    if unevenness > allowed:
        raise BadGeometry(
            f"expected equal steps between images, got {steps[worst]:.6g} mm instead of "
            f"{usual:.6g} mm behind image {worst + 1} of {count}, at {heights[worst]:.6g} mm along "
            "the normal; is one missing?"
        )
    deviation = np.linalg.norm(offsets, axis=1)
    raise BadGeometry(
        f"expected images in a straight stack, got image {int(deviation.argmax()) + 1} of {count} "
        f"{deviation.max():.3g} mm beside its place"
    )


def _last_decimal(positions: Points) -> float:
    """Return what the last decimal of positions stands for, in mm; 0 if they have many."""
    for decimals in DECIMALS:
        if np.array_equal(positions, positions.round(decimals)):
            return 1.001 * 10**-decimals  # Off by that exactly, a difference may be a bit more.
    return 0.0
