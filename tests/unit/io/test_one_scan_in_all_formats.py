"""One scan in every format: the same voxels at the same places, however it is stored."""

from itertools import permutations, product

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from app.io.volume import read_volume
from tests.support.dicom_files import as_dicom, zipped
from tests.support.nifti_files import SHAPE, counting
from tests.support.scan_files import as_metaimage, as_mgh, as_nifti, as_nrrd

ORIENTATIONS = [
    np.eye(3)[list(axes)] * np.array(signs)
    for axes in permutations(range(3))
    for signs in product((1.0, -1.0), repeat=3)
]
"""All 48 orders and directions of the axes."""

SPACING = np.array([0.7, 1.1, 2.5])
FLIP_K = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, SHAPE[2] - 1], [0, 0, 0, 1]])
TOLERANCE_MM = 1e-6
FLOAT32_MM = 2e-5
"""Of the numbers in a FreeSurfer file."""


def oblique() -> np.ndarray:
    """Make a rotation about no axis in particular."""
    rotation, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(3, 3)))
    return rotation


def placed(orientation: np.ndarray) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = orientation * SPACING
    affine[:3, 3] = (-31.25, 12.5, 101.0)
    return affine


PLACED = pytest.mark.parametrize(
    "orientation", [*ORIENTATIONS, oblique(), oblique() @ ORIENTATIONS[13]]
)


@PLACED
def test_affine_and_voxels_are_the_same_in_all_formats(orientation: np.ndarray) -> None:
    array, affine = counting(SHAPE), placed(orientation)
    for content in (
        as_nifti(array, affine),
        as_nrrd(array, affine),
        as_nrrd(array, affine, space="left-anterior-superior", encoding="gzip"),
        as_metaimage(array, affine),
        as_metaimage(array, affine, zipped=True),
    ):
        volume = read_volume(content)
        assert_array_equal(volume.voxels, array)
        assert_allclose(volume.affine, affine, atol=TOLERANCE_MM)
    for content in (as_mgh(array, affine), as_mgh(array, affine, zipped=True)):
        volume = read_volume(content)
        assert_array_equal(volume.voxels, array)
        assert_allclose(volume.affine, affine, atol=FLOAT32_MM)


@PLACED
def test_a_series_lies_where_the_scan_does_with_its_slices_along_their_normal(
    orientation: np.ndarray,
) -> None:
    array, affine = counting(SHAPE), placed(orientation)
    volume = read_volume(zipped(as_dicom(array, affine)[::-1]))
    if np.linalg.det(affine) < 0:
        # DICOM says which way is up for a slice, not for a stack of them.
        array, affine = array[:, :, ::-1], affine @ FLIP_K
    assert_array_equal(volume.voxels, array)
    assert_allclose(volume.affine, affine, atol=TOLERANCE_MM)
