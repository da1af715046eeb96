"""Archives of several series: how they are listed, and one of them chosen."""

import io
import re
from typing import Any

import pydicom
import pytest
from numpy.testing import assert_array_equal
from pydicom.uid import ExplicitVRLittleEndian

from app.errors import BadGeometry, BadParameter
from app.io.volume import Selection, check_header, read_volume
from tests.support.dicom_files import PLACE, as_dicom, as_enhanced, write, zipped
from tests.support.nifti_files import counting, nifti


def two_series() -> bytes:
    scout = as_dicom(
        counting((3, 4, 2)), SeriesInstanceUID="1.2.3", Modality="OT", SeriesDescription="scout"
    )
    return zipped([*scout, *as_dicom(SeriesDescription=None)])


def test_several_series_are_listed_and_one_can_be_chosen() -> None:
    content = two_series()
    said = (
        r"expected one series, got 2 \(series 0: 4 images, CT, 7 x 5 of 1.5 x 0.75 mm, coronal "
        r"every 2.5 mm; series 1: \"scout\", 2 images, OT, 3 x 4 of 1.5 x 0.75 mm, coronal every "
        r"2.5 mm\); choose a series, from 0"
    )
    with pytest.raises(BadGeometry, match=said):
        check_header(content)
    assert_array_equal(read_volume(content, selection=Selection(series=0)).voxels, counting())
    assert read_volume(content, selection=Selection(series=1)).voxels.shape == (3, 4, 2)
    assert (
        read_volume(content, selection=Selection(series=0)).digest
        != read_volume(content, selection=Selection(series=1)).digest
    )
    with pytest.raises(BadParameter, match="expected series from 0 to 1, got 2"):
        read_volume(content, selection=Selection(series=2))
    with pytest.raises(BadParameter, match="expected series from 0 to 0, got 1"):
        read_volume(nifti(), selection=Selection(series=1))


@pytest.mark.parametrize(
    ("elements", "told"),
    [
        (
            {"SeriesDescription": "t2_tse_sag ", "RepetitionTime": "3000", "EchoTime": "90.50"},
            '"t2_tse_sag", TR 3000 ms, TE 90.5 ms, ',
        ),
        ({"SeriesDescription": "Schädel", "SpecificCharacterSet": "ISO_IR 192"}, '"Schädel", '),
        ({"SeriesDescription": "Schädel", "SpecificCharacterSet": "ISO_IR 100"}, '"Schädel", '),
        ({"SeriesDescription": "поясница", "SpecificCharacterSet": "ISO_IR 144"}, '"поясница", '),
        ({"SeriesDescription": "模型", "SpecificCharacterSet": "GB18030"}, '"模型", '),
        ({"SeriesDescription": b"\xe4", "SpecificCharacterSet": "GB18030"}, '"ä", '),
        ({"SeriesDescription": "a\x1b[2Jb"}, '"a\\x1b[2Jb", '),
        ({"SeriesDescription": "x" * 65}, f'"{"x" * 64}", '),
        ({"SeriesDescription": "x" * 257, "EchoTime": "7"}, "TE 7 ms, "),
        ({"SeriesDescription": " ", "RepetitionTime": "", "EchoTime": "5\\9"}, ""),
        ({"SeriesDescription": None, "RepetitionTime": "1" * 300}, ""),
    ],
)
def test_series_are_listed_by_what_their_scanner_calls_them(
    elements: dict[str, Any], told: str
) -> None:
    with pydicom.config.disable_value_validation():
        scan = as_dicom(**elements)
    many = zipped([*scan, *as_dicom(SeriesInstanceUID="9.9")])
    listed = f"(series 0: {told}4 images, CT, 7 x 5 of 1.5 x 0.75 mm, coronal every 2.5 mm; series "
    with pytest.raises(BadGeometry, match=re.escape(listed)):
        check_header(many)
    assert_array_equal(read_volume(zipped(scan)).voxels, counting())


def test_slices_of_a_series_at_one_place_are_not_counted_as_apart() -> None:
    echoes = [*as_dicom(), *as_dicom(EchoTime="90")]
    with pytest.raises(BadGeometry, match=r"8 images, CT, .* coronal every 2.5 mm; "):
        check_header(zipped([*echoes, *as_dicom(SeriesInstanceUID="9.9")]))


def test_a_localiser_of_another_orientation_is_another_series() -> None:
    for axes, direction in (([2, 0, 1, 3], "axial"), ([1, 2, 0, 3], "sagittal")):
        turned = as_dicom(affine=PLACE[:, axes])
        with pytest.raises(BadGeometry, match=rf"got 2 \(.* mm, {direction}.*\); choose"):
            check_header(zipped([*as_dicom(), *turned]))


def test_series_of_one_file_have_digests_of_their_own() -> None:
    dataset = pydicom.dcmread(io.BytesIO(as_enhanced()))
    for frame in dataset.PerFrameFunctionalGroupsSequence[:2]:
        turned = pydicom.Dataset()
        turned.ImageOrientationPatient = [1, 0, 0, 0, 0, 1]
        frame.PlaneOrientationSequence = [turned]
    content = write(dataset, ExplicitVRLittleEndian)
    with pytest.raises(BadGeometry, match="got 2"):
        check_header(content)
    first, second = (read_volume(content, selection=Selection(series=series)) for series in (0, 1))
    assert first.voxels.shape == second.voxels.shape == (7, 5, 2)
    assert first.digest != second.digest
