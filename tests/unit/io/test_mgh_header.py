"""FreeSurfer's files: types, frames, what is behind the voxels, and headers that are refused."""

from collections.abc import Mapping
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from app.errors import BadGeometry, BadVoxels, BrokenVolume, LandmarkdError, TooLarge
from app.io.mgh_header import FOOTER_BYTES
from app.io.volume import HEAD_BYTES, Selection, check_header, read_volume
from tests.support.nifti_files import AFFINE, SHAPE, assert_fit_for_use, counting
from tests.support.scan_files import as_mgh


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "float32"])
def test_every_type_is_read_as_stored(dtype: str, zipped: bool) -> None:
    array = counting(dtype=dtype)
    volume = read_volume(as_mgh(array, zipped=zipped))
    assert volume.voxels.dtype == np.dtype(dtype)
    assert_array_equal(volume.voxels, array)
    assert_allclose(volume.affine, AFFINE, atol=1e-5)
    assert volume.warnings == ()
    assert_fit_for_use(volume)


def test_affine_is_that_of_nibabel_in_a_space_that_is_turned_and_sheared() -> None:
    content = as_mgh(Mdc=np.random.default_rng(3).normal(size=(3, 3)), Pxyz_c=(-31.25, 12.5, 101))
    expected = nib.MGHImage.from_bytes(content).affine
    assert_allclose(read_volume(content).affine, expected, atol=1e-5)


@pytest.mark.parametrize("frame", range(3))
def test_the_fourth_axis_counts_frames(frame: int) -> None:
    content = as_mgh(np.stack([counting() + 100 * n for n in range(3)], axis=3))
    volume = read_volume(content, selection=Selection(frame=frame))
    assert_array_equal(volume.voxels, counting() + 100 * frame)
    with pytest.raises(BadGeometry, match="got 3 frames"):
        check_header(content)


def test_what_tools_note_behind_the_voxels_is_left_out_without_a_warning() -> None:
    volume = read_volume(as_mgh(behind=bytes(100_000), zipped=True))
    assert volume.warnings == ()
    assert_array_equal(volume.voxels, counting())
    with pytest.raises(BrokenVolume, match=r"at most 1,048,576 behind the voxels, got more"):
        read_volume(as_mgh(behind=bytes(FOOTER_BYTES)))


@pytest.mark.parametrize("kept", [4, 50, 89])
def test_header_that_is_cut_short_is_refused(kept: int) -> None:
    with pytest.raises(BrokenVolume, match=f"expected a header of 284 bytes, got {kept}"):
        read_volume(as_mgh()[:kept])


@pytest.mark.parametrize("kept", [90, 284, 400])
def test_voxels_that_are_cut_short_are_refused(kept: int) -> None:
    with pytest.raises(BrokenVolume, match="expected 564 bytes"):
        read_volume(as_mgh()[:kept])


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"goodRASFlag": 0}, BadGeometry, "goodRASFlag is not set"),
        ({"type": 2}, BadVoxels, "got the unknown type 2"),
        ({"type": -1}, BadVoxels, "got the unknown type -1"),
        ({"dims": (7, 0, 4, 1)}, BadGeometry, "none empty, got 7 x 0 x 4"),
        ({"dims": (7, 5, 4, 0)}, BadGeometry, "none empty, got 7 x 5 x 4 x 0"),
        ({"dims": (7, 5, -4, 1)}, BadGeometry, "none empty"),
        ({"dims": (7, 5, 99_999, 1)}, TooLarge, "limit is LANDMARKD_MAX_AXIS"),
        ({"dims": (7, 5, 4, (1 << 31) - 1)}, TooLarge, "limit is LANDMARKD_MAX_INFLATED_BYTES"),
        ({"delta": (1, 0, 1)}, BadGeometry, "a positive spacing"),
        ({"delta": (1, -1, 1)}, BadGeometry, "a positive spacing"),
        ({"delta": (1, np.nan, 1)}, BadGeometry, "a positive spacing"),
        ({"delta": (1, np.inf, 1)}, BadGeometry, "finite affine"),
        ({"delta": (1, 1e5, 1)}, BadGeometry, "a spacing from"),
        ({"Mdc": np.ones((3, 3))}, BadGeometry, "independent axes"),
        ({"Mdc": np.zeros((3, 3))}, BadGeometry, "spacing"),
        ({"Pxyz_c": (0, 0, np.nan)}, BadGeometry, "finite affine"),
        ({"Pxyz_c": (0, 0, 1e9)}, BadGeometry, "within 10000 mm of the origin"),
    ],
)
def test_header_that_places_no_scan_in_space_is_refused(
    fields: Mapping[str, Any], error: type[LandmarkdError], said: str
) -> None:
    with pytest.raises(error, match=f"^expected .*(?:{said})"):
        read_volume(as_mgh(**fields))


def test_header_is_checked_by_the_first_bytes() -> None:
    content = as_mgh(np.zeros((64, 64, 64), np.int16), zipped=False)[:HEAD_BYTES]
    assert check_header(content).shape == (64, 64, 64)
    assert check_header(as_mgh()).shape == SHAPE
