"""Frames of coordinates, and maps between them.

There are two kinds of frame. **Voxel** frames count along the axes ``i j k`` of an array; an index
is the centre of its voxel. **World** frames measure ``x y z`` in mm: RAS (x to the patient's
right, y anterior, z superior), which is what NIfTI affines map to, and LPS (left, posterior,
superior), which 3D Slicer and DICOM write. All geometry is float64 NumPy; only voxel *values* live
on a device.
"""

from collections.abc import Sequence
from itertools import permutations, product
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

Affine = Float64[np.ndarray, "4 4"]
"""A map between two 3D frames, acting on homogeneous column vectors."""
Points = Float64[np.ndarray, "*n 3"]
"""Points in a frame that the text around names."""
PointSet = Float64[np.ndarray, "_ 3"]
"""One of several sets of points, whose numbers of points may differ."""

LPS_FROM_RAS: Final[Affine] = np.diag([-1.0, -1.0, 1.0, 1.0])
"""Maps RAS mm to LPS mm, and back: it is its own inverse."""

AXIS_CODES: Final = ("LR", "PA", "IS")
"""The negative and positive end of each RAS world axis, as nibabel and ITK abbreviate them."""

ON_FACE: Final = 1e-5
"""Voxels by which a point may lie outside a face that it lies on: sums of votes in fixed point are
as exact."""

TURNS: Final = np.array(
    [
        np.eye(3)[:, axes] * signs
        for axes in permutations(range(3))
        for signs in product((1, -1), repeat=3)
    ]
)
"""All 48 ways to lay three axes along three others: each holds a column for each that is laid."""


def transform(affine: Affine, points: Points) -> Points:
    """Map points by an affine.

    Args:
        affine: The map, target frame from source frame.
        points: Points in the source frame; any leading shape.

    Returns:
        The points in the target frame.
    """
    return np.asarray(points @ affine[:3, :3].T + affine[:3, 3], dtype=np.float64)


def spacing_of(affine: Affine) -> Float64[np.ndarray, " 3"]:
    """Compute the voxel spacing of an affine: the length of each of its axes, in mm."""
    return np.asarray(np.linalg.norm(affine[:3, :3], axis=0), dtype=np.float64)


def thickness_of(affine: Affine) -> Float64[np.ndarray, " 3"]:
    """Compute how thick a voxel is along each of its axes, in mm: from face to face.

    In a sheared scan, faces are nearer to each other than the edges between them are long.
    """
    return np.asarray(1 / np.linalg.norm(np.linalg.inv(affine)[:3, :3], axis=1), dtype=np.float64)


def corners(shape: Sequence[int]) -> Float64[np.ndarray, "8 3"]:
    """Return the indices of the eight corner voxels of an array."""
    return np.array(list(product(*((0.0, n - 1.0) for n in shape))))


@np.errstate(invalid="ignore")
def is_inside(
    points: Points | tuple[float, float, float], shape: Sequence[int] | np.ndarray
) -> Bool[np.ndarray, "*n"]:
    """Test which indices lie in an array, up to the faces of its outermost voxels; no NaN does."""
    index, end = np.asarray(points), np.asarray(shape) - 0.5
    return np.asarray(((index >= -0.5 - ON_FACE) & (index <= end + ON_FACE)).all(axis=-1))


def distance_beyond(
    points: Points, affine: Affine, shape: Sequence[int]
) -> Float64[np.ndarray, "*n"]:
    """Measure how far outside a scan points lie, in mm: 0 up to the faces of its outermost voxels.

    Args:
        points: In the world of the affine; NaN gives NaN.
        affine: Voxel index -> mm.
        shape: Of the scan, in voxels.
    """
    index = transform(np.linalg.inv(affine), points)
    nearest = np.clip(index, -0.5 - ON_FACE, np.asarray(shape) - 0.5 + ON_FACE)
    return np.asarray(np.linalg.norm((index - nearest) @ affine[:3, :3].T, axis=-1))


def distance_inside(
    points: Points, affine: Affine, shape: Sequence[int]
) -> Float64[np.ndarray, "*n"]:
    """Measure how far points in a scan lie from its border, in mm; negative outside.

    The border is made of the outer faces of the outermost voxels.

    Args:
        points: In the world of the affine; NaN gives NaN.
        affine: Voxel index -> mm.
        shape: Of the scan, in voxels.
    """
    index = transform(np.linalg.inv(affine), points)
    voxels = np.minimum(index + 0.5, np.asarray(shape) - 0.5 - index)
    return np.asarray((voxels * thickness_of(affine)).min(axis=-1))


def translation(offset: Sequence[float] | Float64[np.ndarray, " 3"]) -> Affine:
    """Make the affine that shifts by ``offset``."""
    affine = np.eye(4)
    affine[:3, 3] = offset
    return affine


def scaling(factors: Sequence[float] | Float64[np.ndarray, " 3"]) -> Affine:
    """Make the affine that multiplies each axis by its factor."""
    return np.diag([*factors, 1.0])


def assign_axes(affine: Affine) -> Int64[np.ndarray, "3 2"]:
    """Assign to every array axis the world axis that it comes nearest to, and its sense.

    Of all 24 assignments that keep the handedness of the affine, that of the largest summed cosine:
    every world axis is used once whatever the obliqueness, and no scan becomes its mirror image,
    however sheared it is. It does not depend on the order in which the axes are stored, but where
    two assignments are equally good, as of axes turned by 45 degrees.

    Returns:
        For each array axis the world axis, and 1, or -1 where it runs against it, as orientations
        of nibabel are written.
    """
    cosines = affine[:3, :3] / spacing_of(affine)
    turns = TURNS[np.linalg.det(TURNS) * np.linalg.det(cosines) >= 0]
    # Sorted, so that the sum rounds alike in whatever order the axes are stored.
    alignment = np.sort((turns * cosines).sum(axis=1), axis=1).sum(axis=1)
    nearest = turns[alignment.argmax()].astype(np.int64)
    return np.stack([np.abs(nearest).argmax(axis=0), nearest.sum(axis=0)], axis=1)


def axis_codes(affine: Affine) -> str:
    """Name the RAS direction that each array axis comes nearest to, such as ``LPS``."""
    return "".join(AXIS_CODES[world][int(sense > 0)] for world, sense in assign_axes(affine))
