"""Structured reports, read back by a plain walk with pydicom."""

import json
import sys
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.testing import assert_allclose
from pydicom.uid import CTImageStorage, EnhancedMRImageStorage

from app.errors import UnknownFormat
from app.geometry import transform
from app.inference.answers import build_answer, timing_of
from app.inference.detector import Detection, StageTimes, VolumeInfo
from app.io.dicom import find_evidence
from app.io.formats import load_report_writer
from app.io.schemas import LandmarksAnswer, ModelRef
from app.io.slicer import write_mrk_json
from app.io.volume import VolumeLimits, read_volume
from app.measurements import MeasurementSpec
from app.voting.landmarks import Landmark
from tests.support.dicom_files import (
    FRAME_OF_REFERENCE,
    PATIENT,
    PLACE,
    SERIES,
    STUDY,
    as_dicom,
    as_enhanced,
    changed,
    zipped,
)
from tests.support.nifti_files import SHAPE, counting
from tests.support.required import needs_reports
from tests.support.scan_files import as_nifti
from tests.support.structured_reports import comments, frames_of_reference, read_report, references

pytestmark = needs_reports

TOLERANCE_MM = 1e-3
LIMIT = VolumeLimits().inflated_bytes
FILES = as_dicom()
TILTED = PLACE + np.array([0, 0, 0.7, 0, 0, 0, 0, 0, 0, 0, -0.4, 0, 0, 0, 0, 0]).reshape(4, 4)
FAR = PLACE + np.array([[0.0, 0, 0, 9_000]] * 3 + [[0.0] * 4])
"""Where single precision is coarsest, within what is read."""
SCANS = {
    "oblique": zipped(FILES),
    "tilted": zipped(as_dicom(affine=TILTED)),
    "multi-frame": as_enhanced(affine=PLACE),
    "far away": zipped(as_dicom(affine=FAR)),
    "one file": FILES[0],
}
PLACES = {"tip": (0.25, 1.5, 2.125), "b\\ase of £ 日本": (3.0, 0.0, 1.75), "end": (0.1, 3.9, 0.0)}
MISSING = "gone"
SPECS = (
    MeasurementSpec(
        name="length", kind="distance", points=("tip", "end"), description=f"a\nb\t{'c' * 99}"
    ),
    MeasurementSpec(name="bend", kind="angle", points=("tip", "end", "tip", "b\\ase of £ 日本")),
    MeasurementSpec(name="lost", kind="distance", points=("tip", MISSING)),
)


def landmark(name: str, ijk: tuple[float, ...] | None, affine: np.ndarray, **more: Any) -> Landmark:
    place = None if ijk is None else np.array(ijk)
    given = {"status": "detected" if ijk else "not_found", "region95_mm": 0.6} | more
    return Landmark(
        name=name, description="where it is", ijk=place,
        ras_mm=None if place is None else transform(affine, place), confidence=0.75, mass=1.5,
        coherence=0.5, spread_mm=None, disagreement_mm=None, expected_ras_mm=None, candidates=(),
        **given,
    )  # fmt: skip


def answer_to(content: bytes) -> LandmarksAnswer:
    """Answer at voxels, with the affine of the volume that is read."""
    volume = read_volume(content)
    found = [landmark(name, ijk, volume.affine) for name, ijk in PLACES.items()]
    found[1] = landmark(
        found[1].name, PLACES[found[1].name], volume.affine,
        status="low_confidence", region95_mm=None,
    )  # fmt: skip
    shape = volume.voxels.shape
    detection = Detection(
        VolumeInfo(shape, volume.affine, volume.digest),
        (*found, landmark(MISSING, None, volume.affine)),
        (),
        1,
        StageTimes(),
    )
    return build_answer(
        detection,
        model=ModelRef(name="toy", version="1.2.0", digest="cd" * 32),
        request_id="r",
        timing=timing_of(detection, receive_ms=0.0, start_s=0.0),
        measurements=SPECS,
    )


def report_on(content: bytes, **how: Any) -> bytes:
    return load_report_writer()(answer_to(content), find_evidence(content, LIMIT, **how))


@pytest.mark.parametrize("scan", SCANS)
def test_points_are_those_of_mrk_json_in_the_frame_of_the_images(scan: str) -> None:
    dataset, groups = read_report(report_on(SCANS[scan]))
    (markup,) = json.loads(write_mrk_json(answer_to(SCANS[scan])))["markups"]
    expected = {one["label"]: one.get("position") for one in markup["controlPoints"]}
    assert expected.keys() == {*PLACES, MISSING} <= groups.keys()
    for name, position in expected.items():
        point = groups[name].point
        assert (point is None) == (position is None)
        if point and position:
            assert_allclose(point, position, rtol=0, atol=TOLERANCE_MM)
    assert frames_of_reference(dataset) == {FRAME_OF_REFERENCE}


def test_every_landmark_says_how_sure_it_is() -> None:
    _, groups = read_report(report_on(SCANS["oblique"]))
    confidence, region = (
        "Confidence that the landmark is there", "Radius of the 95 % region of the position",
    )  # fmt: skip
    assert groups["tip"].numbers == {confidence: (0.75, "1"), region: (0.6, "mm")}
    unsure = groups["b\\ase of £ 日本"]
    assert unsure.numbers == {confidence: (0.75, "1")}
    assert unsure.words["Finding"] == "toy/b/ase of £ 日本"
    statuses = {name: groups[name].words["Status of a landmark"] for name in (*PLACES, MISSING)}
    assert list(statuses.values()) == ["detected", "low_confidence", "detected", "not_found"]
    assert groups["tip"].words["Algorithm Name"] == "toy"
    assert groups["tip"].words["Algorithm Version"] == "1.2.0"
    assert groups["tip"].words["Algorithm Parameters"] == f"SHA-256 {'cd' * 32}"


def test_warnings_are_comments_on_the_scan() -> None:
    warnings = ["All positions are doubtful: 1.59 times as large", "a \\ b of £ 日本"]
    answer = answer_to(SCANS["one file"]).model_copy(update={"warnings": warnings})
    found = find_evidence(SCANS["one file"], LIMIT)
    dataset, groups = read_report(load_report_writer()(answer, found))
    assert comments(dataset) == warnings
    assert groups.keys() == read_report(report_on(SCANS["one file"]))[1].keys()


def test_measurements_have_units_intervals_and_the_points_they_are_between() -> None:
    answer = answer_to(SCANS["tilted"])
    dataset, groups = read_report(report_on(SCANS["tilted"]))
    length, bend, _ = answer.measurements
    assert "lost" not in groups
    low, high = "Lower bound of the 95 % interval", "Upper bound of the 95 % interval"
    name = f"length: a b {'c' * 49}..."
    assert set(groups["length"].numbers) == {name, low, high}
    assert length.interval95
    for key, value in zip((name, low, high), (length.value, *length.interval95), strict=True):
        number, unit = groups["length"].numbers[key]
        assert number == pytest.approx(value)
        assert unit == "mm"
    ((number, unit),) = groups["bend"].numbers.values()
    assert number == pytest.approx(bend.value)
    assert unit == "deg"
    for group, names in (("length", SPECS[0].points), ("bend", SPECS[1].points)):
        points = [groups[name].point for name in names]
        assert groups[group].sources == points
    assert dataset.CompletionFlag == "COMPLETE"
    assert dataset.VerificationFlag == "UNVERIFIED"


def test_the_very_images_are_referred_to() -> None:
    other = as_dicom(counting((5, 4, 2)), SeriesInstanceUID="1.2.3")
    found = find_evidence(zipped([*other, *FILES[::-1]]), LIMIT, series=0)
    dataset, _ = read_report(load_report_writer()(answer_to(SCANS["oblique"]), found))
    expected = [(STUDY, SERIES, CTImageStorage, f"{SERIES}.{k + 1}") for k in range(SHAPE[2])]
    assert references(dataset) == expected
    assert dataset.StudyInstanceUID == STUDY
    assert dataset.SeriesInstanceUID not in {SERIES, "1.2.3"}
    frames, _ = read_report(report_on(SCANS["multi-frame"]))
    assert references(frames) == [(STUDY, SERIES, EnhancedMRImageStorage, f"{SERIES}.1")]


PERSON = {
    "PatientName": "Müller^Jörg", "PatientID": "77", "PatientBirthDate": "19700102",
    "PatientSex": "M", "StudyDate": "20260504", "StudyTime": "101112", "StudyID": "S9",
    "AccessionNumber": "A5", "ReferringPhysicianName": "Dr^Who", "InstitutionName": "Ward 12",
    "SpecificCharacterSet": "ISO_IR 100",
}  # fmt: skip


def test_a_report_says_whose_the_images_are_only_where_it_is_asked_to() -> None:
    scan = zipped([changed(file, **PERSON) for file in FILES])
    for content, named in ((report_on(scan), False), (report_on(scan, identified=True), True)):
        dataset, _ = read_report(content)
        for name in ("PatientName", "PatientID", "PatientBirthDate", "StudyDate", "StudyID"):
            assert str(dataset[name].value or "") == (PERSON[name] if named else "")
        hidden = [value.encode("utf-8") for value in (*PERSON.values(), PATIENT) if len(value) > 2]
        assert any(value in content for value in hidden) == named
        assert dataset.file_meta.TransferSyntaxUID.is_little_endian


@pytest.mark.filterwarnings("ignore:Invalid value for VR")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PatientSex", sex) for sex in ("U", "N", "male", "UNKNOWN", ["M", "F"])),
        *(("StudyTime", time) for time in ("10:11:12", "101112.1234567", "2511")),
        *(("StudyDate", date) for date in ("2024", "00000000", "20241301")),
        ("PatientBirthDate", "1960"),
    ],
)
def test_what_no_report_can_say_of_a_patient_or_study_is_left_empty(
    name: str, value: str | list[str]
) -> None:
    scan = zipped([changed(file, **PERSON | {name: value}) for file in FILES])
    dataset, _ = read_report(report_on(scan, identified=True))
    said = {each: str(dataset[each].value or "") for each in PERSON if each in dataset}
    assert said.keys() == PERSON.keys() - {"InstitutionName"}
    assert said == {each: PERSON[each] for each in said} | {
        name: "", "SpecificCharacterSet": "ISO_IR 192",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("elements", "identified"),
    [
        ({"SOPClassUID": "1.3.46.670589.11.0.0.12.1"}, False),
        ({"SOPClassUID": "1.3.46.670589.11.0.0.12.1"}, True),
        ({"PatientName": ["Doe", "John"]}, True),
    ],
)
def test_images_that_no_report_can_be_made_of_are_refused(
    elements: dict[str, Any], *, identified: bool
) -> None:
    scan = zipped([changed(file, **elements) for file in FILES])
    with pytest.raises(UnknownFormat, match=r"^expected images of a standard SOP class") as caught:
        report_on(scan, identified=identified)
    assert "Doe" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (as_nifti(counting(), PLACE), "expected a scan that came as DICOM .* of another format"),
        (zipped(as_dicom(FrameOfReferenceUID=None)), "each image's frame of reference"),
        (FILES[0].replace(STUDY.encode(), (STUDY[:-3] + "Doe").encode()), "each image's study"),
        (zipped([changed(file, SOPInstanceUID="1.2") for file in FILES]), "UIDs of their own"),
        (zipped([changed(FILES[0], StudyInstanceUID="1.2"), *FILES[1:]]), "of one study"),
    ],
)
def test_what_cannot_be_referred_to_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(UnknownFormat, match=said) as caught:
        find_evidence(content, LIMIT)
    assert "Doe" not in str(caught.value)


def test_missing_highdicom_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "app.io.dicom.report", raising=False)
    monkeypatch.setitem(sys.modules, "highdicom", None)
    with pytest.raises(UnknownFormat, match=r"pip install 'landmarkd\[dicom\]'"):
        load_report_writer()


def test_reports_on_one_scan_are_documents_of_their_own() -> None:
    first, second = (read_report(report_on(SCANS["one file"]))[0] for _ in range(2))
    for name in ("SOPInstanceUID", "SeriesInstanceUID"):
        assert first[name].value != second[name].value
        assert pydicom.uid.UID(first[name].value).is_valid
