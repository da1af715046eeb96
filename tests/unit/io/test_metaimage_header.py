"""MetaImage: types, compression, frames, and headers that are refused."""

import gzip
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from app.errors import BadGeometry, BadVoxels, BrokenVolume, LandmarkdError, NotAVolume, TooLarge
from app.io.volume import HEAD_BYTES, Selection, VolumeLimits, check_header, read_volume
from tests.support.nifti_files import AFFINE, SHAPE, ByteOrder, assert_fit_for_use, counting
from tests.support.scan_files import MET_TYPES, as_metaimage

FOUR_AXES = {
    "NDims": 4, "DimSize": "7 5 4 1", "Offset": "0 0 0 0", "ElementSpacing": "1 1 1 1",
}  # fmt: skip


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", MET_TYPES)
def test_every_type_is_read_as_stored(dtype: str, order: ByteOrder, zipped: bool) -> None:
    array = counting(dtype=dtype)
    volume = read_volume(
        as_metaimage(array.astype(np.dtype(dtype).newbyteorder(order)), zipped=zipped)
    )
    assert volume.voxels.dtype == np.dtype(dtype)
    assert_array_equal(volume.voxels, array)
    assert_allclose(volume.affine, AFFINE)
    assert volume.warnings == ()
    assert_fit_for_use(volume)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("frame", range(3))
def test_the_fourth_axis_counts_frames(frame: int, zipped: bool) -> None:
    content = as_metaimage(
        np.stack([counting() + 100 * n for n in range(3)], axis=3), zipped=zipped
    )
    assert_array_equal(
        read_volume(content, selection=Selection(frame=frame)).voxels, counting() + 100 * frame
    )
    with pytest.raises(BadGeometry, match="got 3 frames"):
        check_header(content)


def test_digest_does_not_depend_on_how_well_it_is_zipped_outside() -> None:
    plain = as_metaimage()
    assert read_volume(gzip.compress(plain)).digest == read_volume(plain).digest
    with pytest.raises(BrokenVolume, match="zipped again"):
        read_volume(gzip.compress(as_metaimage(zipped=True)))


def test_comment_may_come_first() -> None:
    volume = read_volume(b"Comment = of a phantom\n" + as_metaimage())
    assert_array_equal(volume.voxels, counting())


def test_voxels_are_binary_unless_the_header_says_otherwise() -> None:
    """So ITK reads them; fields of the header are optional to it."""
    assert_array_equal(read_volume(as_metaimage(BinaryData=None)).voxels, counting())


@pytest.mark.parametrize("kept", [-1, -4, -20])
def test_truncated_and_corrupt_zlib_streams_are_refused(kept: int) -> None:
    content = as_metaimage(zipped=True)
    with pytest.raises(BrokenVolume, match="truncated"):
        read_volume(content[:kept])
    damaged = bytearray(content)
    damaged[kept] ^= 0xFF
    with pytest.raises(BrokenVolume, match=r"corrupt|truncated"):
        read_volume(bytes(damaged))


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"ElementDataFile": "DOE.raw\n"}, NotAVolume, "another file"),
        ({"ElementDataFile": "LIST\n"}, NotAVolume, "another file"),
        ({"ObjectType": "Mesh"}, NotAVolume, "of another type"),
        ({"BinaryData": False}, NotAVolume, "got them as text"),
        ({"HeaderSize": 12}, BrokenVolume, "got a HeaderSize"),
        ({"ElementType": "MET_STRING"}, BadVoxels, "got others"),
        ({"ElementType": None}, BrokenVolume, "one ElementType"),
        ({"ElementNumberOfChannels": 3}, BadVoxels, "got others"),
        ({"TransformMatrix": None}, BadGeometry, "one TransformMatrix"),
        ({"TransformMatrix": "1 0 0 0 1 0 0 0 0"}, BadGeometry, "got 1 x 1 x 0|spacing"),
        ({"TransformMatrix": "1 0 0 0 1 0 0 0"}, BrokenVolume, "9 numbers in TransformMatrix"),
        ({"TransformMatrix": "1 0 0 1 0 0 0 0 1"}, BadGeometry, "independent axes"),
        ({"Offset": None}, BadGeometry, "one Offset"),
        ({"Offset": "1 2 nan"}, BrokenVolume, "3 numbers in Offset"),
        ({"Position": "1 2 4"}, BadGeometry, "one Offset in a MetaImage header, got 2"),
        ({"ElementSpacing": None}, BadGeometry, "one ElementSpacing"),
        ({"ElementSpacing": "1 1 -1"}, BadGeometry, "positive ElementSpacing"),
        ({"ElementSpacing": "1 1 1e300"}, BadGeometry, "spacing"),
        ({"DistanceUnits": "cm"}, BadGeometry, "got others"),
        ({"NDims": 2, "DimSize": "7 20"}, BadGeometry, "3 axes or more"),
        ({"NDims": 4}, BrokenVolume, "as NDims says"),
        ({"Comment = a\nComment": "b"}, BrokenVolume, "each once"),
        ({"no field\nComment": "b"}, BrokenVolume, "each once"),
        (FOUR_AXES | {"TransformMatrix": "1 0 0 1 0 1 0 0 0 0 1 0 0 0 0 1"}, BadGeometry, "across"),
        (FOUR_AXES | {"TransformMatrix": "1 0 0 0 0 1 0 0 0 0 1 0 1 0 0 1"}, BadGeometry, "across"),
        ({"DimSize": "7 5 99999"}, TooLarge, "limit is LANDMARKD_MAX_AXIS"),
    ],
)
def test_header_that_places_no_scan_in_space_is_refused(
    fields: dict[str, Any], error: type[LandmarkdError], said: str
) -> None:
    with pytest.raises(error, match=f"^expected .*(?:{said})") as caught:
        read_volume(as_metaimage(**fields))
    assert "DOE" not in str(caught.value)


def test_limits_are_checked_by_the_header_alone() -> None:
    content = as_metaimage(zipped=True).split(b"LOCAL\n")[0] + b"LOCAL\n"
    content = content.ljust(HEAD_BYTES, b"\0")  # The start of a longer file.
    assert check_header(content).shape == SHAPE
    with pytest.raises(TooLarge, match="limit is LANDMARKD_MAX_VOXELS"):
        check_header(content, VolumeLimits(voxels=139))
