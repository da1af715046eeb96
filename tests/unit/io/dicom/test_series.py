"""Series: order, steps, gantry tilt, several series, and images that are no stack."""

import io
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from app.errors import (
    BadGeometry,
    BadParameter,
    BadVoxels,
    BrokenVolume,
    DeadlineExceeded,
    NotAVolume,
    RequestError,
    TooLarge,
)
from app.io.dicom.series import MAX_IMAGES
from app.io.volume import Selection, VolumeLimits, check_header, read_volume
from tests.support.cancelling import NobodyWaitsError, cancelled_after
from tests.support.dicom_files import (
    PATIENT,
    PLACE,
    as_dicom,
    as_enhanced,
    changed,
    crowded,
    write,
    zipped,
)
from tests.support.nifti_files import SHAPE, assert_fit_for_use, counting, nifti


def shuffled(files: list[bytes]) -> list[bytes]:
    return [files[at] for at in np.random.default_rng(2).permutation(len(files))]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_images_are_sorted_by_their_place(dtype: str, method: int) -> None:
    volume = read_volume(zipped(shuffled(as_dicom(counting(dtype=dtype))), method))
    assert volume.voxels.dtype == np.dtype(dtype)
    assert_array_equal(volume.voxels, counting())
    assert_allclose(volume.affine, PLACE, atol=1e-9)
    assert volume.warnings == ()
    assert_fit_for_use(volume)


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRBigEndian])
def test_every_plain_transfer_syntax_is_read(syntax: str) -> None:
    assert_array_equal(read_volume(zipped(as_dicom(syntax=syntax))).voxels, counting())


def test_what_says_nothing_new_may_be_left_out() -> None:
    optional = ("BitsStored", "HighBit", "SamplesPerPixel", "PixelRepresentation")
    left_out: dict[str, Any] = dict.fromkeys(optional)
    files = as_dicom(counting(dtype="uint16"), ModalityLUTSequence=[], **left_out)
    assert_array_equal(read_volume(zipped(files)).voxels, counting())
    dataset = pydicom.dcmread(io.BytesIO(as_enhanced()))
    del dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SliceThickness
    content = write(dataset, ExplicitVRLittleEndian)
    assert_array_equal(read_volume(content).voxels, counting() * 2 - 5)


def test_bytes_of_big_endian_files_are_refused_as_they_may_be_swapped() -> None:
    with pytest.raises(BadVoxels, match="16 or 32 bits in big-endian files, got 8"):
        read_volume(zipped(as_dicom(counting(dtype="uint8"), syntax=ExplicitVRBigEndian)))


def test_digest_depends_on_the_images_alone() -> None:
    files = as_dicom()
    digest = read_volume(zipped(files)).digest
    assert read_volume(zipped(files[::-1], zipfile.ZIP_STORED, "{}")).digest == digest
    assert read_volume(zipped([b"notes", *files])).digest == digest
    assert read_volume(zipped(as_dicom(counting() + 1))).digest != digest
    assert read_volume(files[0]).digest == read_volume(zipped(files[:1])).digest


def test_descending_slices_are_stored_in_ascending_order() -> None:
    down = PLACE @ np.diag([1.0, 1.0, -1.0, 1.0])
    volume = read_volume(zipped(as_dicom(affine=down)))
    assert_array_equal(volume.voxels, counting()[:, :, ::-1])
    assert_allclose(volume.affine @ [0, 0, 3, 1], down @ [0, 0, 0, 1], atol=1e-9)


def test_slope_and_intercept_of_all_images_are_applied() -> None:
    volume = read_volume(zipped(as_dicom(RescaleSlope="0.5", RescaleIntercept="-1024")))
    assert volume.voxels.dtype == np.float32
    assert_allclose(volume.voxels, counting() * 0.5 - 1024)


def test_slopes_may_differ_from_image_to_image() -> None:
    files = [
        changed(file, RescaleSlope=str(k + 1), RescaleIntercept=str(10 * k))
        for k, file in enumerate(as_dicom())
    ]
    volume = read_volume(zipped(files))
    k = np.arange(4)
    assert volume.voxels.dtype == np.float32
    assert_allclose(volume.voxels, counting() * (k + 1) + 10 * k)
    assert check_header(zipped(files)).dtype == np.float32


def test_bits_that_do_not_count_are_cleared() -> None:
    array = counting() - 50
    overlaid = (array & 0x0FFF | 0x5000).astype("int16")
    files = as_dicom(overlaid, BitsStored=12, HighBit=11)
    assert_array_equal(read_volume(zipped(files)).voxels, array)


def test_tilted_gantry_gives_a_sheared_affine_that_is_exact() -> None:
    tilted = PLACE.copy()
    tilted[:3, 2] += 0.3 * PLACE[:3, 1]
    volume = read_volume(zipped(shuffled(as_dicom(affine=tilted))))
    assert_allclose(volume.affine, tilted, atol=1e-9)
    assert volume.warnings[0].startswith("the images are shifted against each other by 5.1 degrees")


def test_single_image_is_a_single_slice() -> None:
    volume = read_volume(as_dicom()[0])
    assert volume.voxels.shape == (7, 5, 1)
    assert_allclose(volume.affine, PLACE, atol=1e-9)
    assert volume.warnings == ("the scan is a single slice (7 x 5 x 1 voxels)",)
    thin = read_volume(changed(as_dicom()[0], SliceThickness=None))
    assert thin.warnings[0] == "the file does not say how thick its slice is; 1 mm was assumed"


@pytest.mark.parametrize("packed", [False, True])
def test_enhanced_multi_frame_file_is_read(packed: bool) -> None:
    content = as_enhanced()
    volume = read_volume(zipped([content]) if packed else content)
    assert_array_equal(volume.voxels, counting() * 2 - 5)
    assert_allclose(volume.affine, PLACE, atol=1e-9)


def test_missing_image_is_noticed_and_its_place_named() -> None:
    files = as_dicom(counting((7, 5, 9)))
    del files[5]
    said = (
        "expected equal steps between images, got 5 mm instead of 2.5 mm behind image 5 of 8, at "
    )
    with pytest.raises(BadGeometry, match=said):
        check_header(zipped(shuffled(files)))


def test_image_beside_the_stack_is_noticed() -> None:
    files = as_dicom()
    beside = PLACE.copy()
    beside[0, 3] += 0.5
    files[2] = as_dicom(affine=beside)[2]
    with pytest.raises(BadGeometry, match=r"image 3 of 4 0\.[45]\d* mm beside its place|steps"):
        check_header(zipped(files))


def test_two_images_at_one_place_are_refused() -> None:
    files = as_dicom()
    with pytest.raises(BadGeometry, match=r"expected one image at each place, got 2 or more"):
        check_header(zipped([*files, changed(files[1], InstanceNumber=77)]))
    with pytest.raises(BadGeometry, match=r"at some \(8 images at 4 places\), the first at"):
        check_header(zipped([*files, *files]))


def test_frames_without_places_are_refused() -> None:
    with pytest.raises(BadGeometry, match="a place for each of 4 frames"):
        check_header(as_enhanced(PerFrameFunctionalGroupsSequence=None))


def test_files_that_are_no_images_are_ignored_with_a_warning() -> None:
    files = [b"notes", *as_dicom(), as_dicom(SeriesInstanceUID="1.9", ImagePositionPatient=None)[0]]
    volume = read_volume(zipped(files))
    assert_array_equal(volume.voxels, counting())
    assert volume.warnings == ("ignored files beside those of the scan: 2",)


@pytest.mark.parametrize(
    ("elements", "error", "said"),
    [
        ({"ImagePositionPatient": None}, BadGeometry, "with ImagePositionPatient"),
        ({"ImageOrientationPatient": None}, BadGeometry, "with ImageOrientationPatient"),
        ({"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}, BadGeometry, "perpendicular"),
        ({"ImageOrientationPatient": [2, 0, 0, 0, 1, 0]}, BadGeometry, "unit vectors"),
        ({"PixelSpacing": None}, BadGeometry, "with PixelSpacing"),
        ({"ImageType": ["ORIGINAL", "PRIMARY", "M", "MOSAIC"]}, BadGeometry, "got a mosaic"),
        ({"ImageType": ["ORIGINAL", "PRIMARY", "M", "VFRAME"]}, BadGeometry, "got a mosaic"),
        ({"PixelSpacing": ["0", "1"]}, BadGeometry, "positive PixelSpacing"),
        ({"PhotometricInterpretation": "RGB", "SamplesPerPixel": 3}, BadVoxels, "colours"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, BadVoxels, "palette"),
        ({"SamplesPerPixel": 3}, BadVoxels, "colours"),
        ({"ModalityLUTSequence": [pydicom.Dataset()]}, BadVoxels, "got a Modality LUT"),
        ({"HighBit": 14, "BitsStored": 12}, BadVoxels, "HighBit"),
        ({"BitsAllocated": 1, "BitsStored": 1, "HighBit": 0}, BadVoxels, "got 1 of 1"),
        ({"BitsStored": 17, "HighBit": 16}, BadVoxels, "got 17 of 16"),
        ({"Rows": 6}, BrokenVolume, "84 bytes of pixels in a DICOM file, got 70"),
        ({"Rows": 0}, BadGeometry, "rows and columns"),
        ({"Columns": 0}, BadGeometry, "rows and columns"),
        ({"Rows": None}, BrokenVolume, "with Rows"),
        ({"ImagePositionPatient": ["1e99", 0, 0]}, BadGeometry, "finite positions"),
        ({"RescaleSlope": "1e999"}, BadVoxels, "finite RescaleSlope"),
        ({"RescaleSlope": "1e99"}, None, ""),
    ],
)
def test_images_that_cannot_be_placed_or_read_are_refused(
    elements: dict[str, Any], error: type[RequestError] | None, said: str
) -> None:
    content = zipped(as_dicom(**elements))
    if error is None:
        with pytest.raises(BadVoxels, match="expected finite voxels"):
            read_volume(content)
        return
    with pytest.raises(error, match=f"^expected .*{said}"):
        read_volume(content)


def as_text(file: bytes, name: str, text: str) -> bytes:
    """Change a number of a file to what may be none."""
    dataset = pydicom.dcmread(io.BytesIO(file))
    dataset[name] = pydicom.DataElement(name, "LO", text)
    return write(dataset, ExplicitVRLittleEndian)


MALFORMED = [
    ("PixelSpacing", "0.5"),
    ("ImagePositionPatient", "0\\0"),
    ("ImageOrientationPatient", "1\\0\\0\\0\\x\\0"),
    ("RescaleSlope", "1,0"),
    ("RescaleSlope", "1-2"),
    ("RescaleIntercept", PATIENT),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_a_malformed_number_is_named_and_refuses_its_series_alone(name: str, text: str) -> None:
    files = as_dicom()
    foreign = as_text(as_dicom(SeriesInstanceUID="1.2.9")[0], name, text)
    content = zipped([foreign, *files, *as_dicom(counting((3, 4, 2)), SeriesInstanceUID="1.2.3")])
    assert_array_equal(read_volume(content, selection=Selection(series=0)).voxels, counting())
    with pytest.raises(BrokenVolume, match=rf"^expected \d numbers in {name}, got") as caught:
        read_volume(zipped([*files[:3], as_text(files[3], name, text)]))
    assert text not in str(caught.value)
    assert "in 1 of 4 files of the series" in str(caught.value)


@pytest.mark.parametrize("elements", [{"Rows": None}, {"Rows": 6}, {"NumberOfFrames": "0"}])
def test_a_file_that_contradicts_itself_refuses_its_series_alone(elements: dict[str, Any]) -> None:
    foreign = changed(as_dicom(SeriesInstanceUID="1.2.9")[0], **elements)
    with pytest.raises(BrokenVolume, match=r"^expected .*, got "):
        read_volume(foreign)
    content = zipped([foreign, *as_dicom()])
    assert_array_equal(read_volume(content, selection=Selection(series=0)).voxels, counting())


def test_of_files_that_cannot_be_placed_the_reason_alone_is_kept() -> None:
    file = as_enhanced(counting((2, 2, 400)), PhotometricInterpretation="RGB")
    contents = [zipped([file] * count) for count in (2, 12)]
    peaks = []
    for content in contents:
        tracemalloc.start()
        with pytest.raises(BadVoxels, match="colours"):
            check_header(content)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_thickness_that_is_no_number_matters_to_a_single_slice_alone() -> None:
    files = [as_text(file, "SliceThickness", "5.0 mm") for file in as_dicom()]
    volume = read_volume(zipped(files))
    assert_allclose(volume.affine, PLACE, atol=1e-9)
    assert volume.warnings == ()
    assert read_volume(files[0]).warnings[0].endswith("1 mm was assumed")


def test_colours_among_the_images_of_a_series_are_counted() -> None:
    files = as_dicom()
    colours = changed(
        files[0], SOPInstanceUID="1.2.7", PhotometricInterpretation="RGB", SamplesPerPixel=3
    )
    said = (
        "^expected one grey value per pixel, got colours or a palette, in 1 of 5 files of the "
        "series; leave out what is no slice of the scan$"
    )
    with pytest.raises(BadVoxels, match=said):
        read_volume(zipped([*files, colours]))


def test_part_of_a_series_that_cannot_be_placed_is_not_ignored() -> None:
    files = as_dicom()
    files[3] = changed(files[3], ImagePositionPatient=None)
    with pytest.raises(BadGeometry, match="with ImagePositionPatient"):
        read_volume(zipped(files))


@pytest.mark.parametrize("kept", [140, 400, -1])
def test_truncated_file_is_refused(kept: int) -> None:
    with pytest.raises(BrokenVolume, match=r"truncated|bytes of pixels"):
        read_volume(as_dicom()[0][:kept])
    files = as_dicom()
    with pytest.raises(BrokenVolume, match=r"truncated.*, in file 3 of 4 in the archive$"):
        read_volume(zipped([*files[:2], files[2][:kept], files[3]]))


def test_archive_without_images_is_refused() -> None:
    with pytest.raises(NotAVolume, match=r"expected DICOM images, got none \(files in all: 1\)"):
        read_volume(zipped([b"notes"]))


@pytest.mark.parametrize("packed", [False, True])
def test_archive_of_scans_of_another_format_is_sent_to_jobs(packed: bool) -> None:
    files = [b"notes", *[nifti(zipped=packed)] * 2]
    message = r"got none \(files in all: 3\); an archive of several scans .* goes to POST /v1/jobs$"
    for read in (read_volume, check_header):
        with pytest.raises(NotAVolume, match=message):
            read(zipped(files))


def test_archive_of_more_files_than_any_scan_has_is_refused_unread() -> None:
    files = zipped([b"x"] * (MAX_IMAGES + 1), zipfile.ZIP_STORED)
    calls = list[None]()
    with pytest.raises(TooLarge, match="expected at most 16,384 files of a scan, got 16,385"):
        check_header(files, check_cancelled=lambda: calls.append(None))
    assert calls == []


def test_limits_are_checked_before_pixels_are_read() -> None:
    with pytest.raises(TooLarge, match="limit is LANDMARKD_MAX_AXIS"):
        read_volume(zipped(as_dicom()), VolumeLimits(axis=6))
    with pytest.raises(BadParameter, match="expected frame from 0 to 0, got 1"):
        read_volume(zipped(as_dicom()), selection=Selection(frame=1))


def test_nothing_that_is_said_names_the_patient() -> None:
    name = PATIENT.split("^", maxsplit=1)[0]
    said = [
        *read_volume(zipped([*as_dicom(np.ones(SHAPE, "int16")), PATIENT.encode()])).warnings,
        *read_volume(as_dicom(Modality=PATIENT[:3])[0]).warnings,
    ]
    for content in (
        zipped(
            [
                *as_dicom(Modality="DOE", SeriesDescription=None),
                *as_dicom(Modality="DOE", SeriesDescription=None, SeriesInstanceUID="1.5"),
            ]
        ),
        zipped(as_dicom(PhotometricInterpretation="DOE")),
        as_dicom()[0][:600],
    ):
        with pytest.raises(RequestError) as caught:
            read_volume(content)
        said.append(str(caught.value))
    assert len(said) >= 5
    assert name not in " ".join(said)


def test_looking_for_a_series_can_be_cancelled() -> None:
    with pytest.raises(NobodyWaitsError):
        check_header(zipped(as_dicom()), check_cancelled=cancelled_after(9))


def test_scan_of_more_elements_than_any_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = zipped([crowded(2000)] * 2)
    monkeypatch.setattr("app.io.dicom.series.MAX_STEPS", 3000)
    assert check_header(zipped(as_dicom())).shape
    with pytest.raises(TooLarge, match="at most 3,000 DICOM elements"):
        check_header(content)


def test_reading_a_file_of_many_elements_can_be_cancelled() -> None:
    calls = list[None]()

    def check_cancelled() -> None:
        calls.append(None)
        if len(calls) > 1000:
            raise DeadlineExceeded("nobody waits")

    with pytest.raises(DeadlineExceeded):
        check_header(crowded(2000), check_cancelled=check_cancelled)
