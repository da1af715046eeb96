"""Formats: the output of each writer can be read back, including missing landmarks."""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import UnknownFormat
from app.inference.answers import build_answer
from app.inference.detector import Detection, StageTimes, VolumeInfo
from app.io import schemas
from app.io.formats import FORMATS, AnswerFormat, negotiate_format, write_answer, write_json
from app.io.schemas import LandmarksAnswer, ModelRef, TimingAnswer
from app.io.slicer import (
    declared_frame,
    markups_json,
    read_landmarks,
    write_fcsv,
    write_long,
    write_mrk_json,
    write_table,
)
from app.measurements import MeasurementSpec
from app.voting.landmarks import Candidate, Landmark
from tests.support.slicer_markups import MarkupsFile

WITH_POSITIONS = [form for form in FORMATS if form.name not in ("measurements", "wide")]
Positions = dict[str, tuple[float, ...] | None]
"""Label -> position in mm, LPS."""
TOLERANCE_MM = 1e-3

names = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=9)
coordinates = st.floats(-500, 500)
places = st.none() | st.tuples(coordinates, coordinates, coordinates)


def landmark_at(name: str, place: tuple[float, float, float] | None) -> Landmark:
    """Make a landmark at a position in mm, RAS, or a missing one."""
    ras_mm = None if place is None else np.array(place)
    return Landmark(
        name=name,
        description='left, "upper"',
        status="not_found" if place is None else "detected",
        ijk=None if ras_mm is None else ras_mm / 2,
        ras_mm=ras_mm,
        confidence=0.75,
        mass=1.5,
        coherence=math.nan,
        spread_mm=None,
        region95_mm=0.6,
        disagreement_mm=math.inf,
        expected_ras_mm=None,
        candidates=(Candidate(np.ones(3), np.array([1.0, 2.0, 3.0]), 0.5),),
    )


def answer_of(
    found: dict[str, tuple[float, float, float] | None],
    candidates: bool = False,
    measurements: Sequence[MeasurementSpec] = (),
) -> LandmarksAnswer:
    detection = Detection(
        VolumeInfo((5, 4, 3), np.diag([-2.0, -1.0, 3.0, 1.0]), "ab" * 32),
        tuple(landmark_at(name, place) for name, place in found.items()),
        ("a warning",),
        1,
        StageTimes(decode=1.0),
    )
    return build_answer(
        detection,
        model=ModelRef(name="toy", version="1", digest="cd" * 32),
        request_id="r",
        timing=TimingAnswer(receive=0.5, total=9.0, **asdict(detection.timing)),
        measurements=measurements,
        candidates=candidates,
    )


def read_json(content: bytes) -> Positions:
    found = LandmarksAnswer.model_validate_json(content).landmarks
    return {landmark.name: landmark.lps_mm for landmark in found}


def read_mrk_json(content: bytes) -> Positions:
    (markup,) = json.loads(content)["markups"]
    assert markup["coordinateSystem"] == "LPS"
    positions: Positions = {}
    for point in markup["controlPoints"]:
        assert (point["positionStatus"] == "defined") == ("position" in point)
        positions[point["label"]] = tuple(point["position"]) if "position" in point else None
    return positions


def read_fcsv(content: bytes) -> Positions:
    version, system, columns, *rows = content.decode().split("\n")
    rows = [row for row in rows if not row.startswith("#")]
    assert version == "# Markups fiducial file version = 4.11"
    assert system == "# CoordinateSystem = LPS"
    assert columns.startswith("# columns = id,x,y,z,")
    return {
        row[11]: tuple(map(float, row[1:4])) if row[14] == "2" else None
        for row in csv.reader(io.StringIO("\n".join(rows)))
    }


def read_table(content: bytes, separator: str) -> Positions:
    rows = csv.DictReader(io.StringIO(content.decode()), delimiter=separator)
    return {
        row["label"]: tuple(float(row[axis]) for axis in "lps") if row["defined"] == "1" else None
        for row in rows
    }


def read_long(content: bytes) -> Positions:
    rows = csv.DictReader(io.StringIO(content.decode()))
    return {
        row["label"]: tuple(float(row[axis]) for axis in "lps") if row["l"] else None
        for row in rows
    }


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (write_json, read_json),
        (write_mrk_json, read_mrk_json),
        (write_fcsv, read_fcsv),
        (write_table, lambda content: read_table(content, ",")),
        (partial(write_table, separator="\t"), lambda content: read_table(content, "\t")),
        (write_long, read_long),
    ],
    ids=["json", "mrk.json", "fcsv", "csv", "tsv", "long"],
)
@given(found=st.dictionaries(names, places, max_size=4))
@settings(max_examples=25)
def test_round_trip_keeps_positions_and_missing_landmarks(
    write: Callable[[LandmarksAnswer], bytes],
    read: Callable[[bytes], Positions],
    found: dict[str, tuple[float, float, float] | None],
) -> None:
    back = read(write(answer_of(found)))
    assert list(back) == list(found)
    for name, place in found.items():
        got = back[name]
        if place is None:
            assert got is None
        else:
            expected = (-place[0], -place[1], place[2])
            assert got == pytest.approx(expected, abs=TOLERANCE_MM)


@pytest.mark.parametrize("suffix", ["mrk.json", "fcsv", "csv", "tsv"])
def test_written_file_is_read_back_in_ras(suffix: str, tmp_path: Path) -> None:
    found = {"a": (1.0, -2.5, 3.0), "b": None, 'the "third", c': (0.25, 0.0, -9.0)}
    path = tmp_path / f"scan.{suffix}"
    path.write_bytes(negotiate_format(FORMATS, suffix, None).write(answer_of(found)))
    assert declared_frame(path) == "LPS"
    points = {name: tuple(point) for name, point in read_landmarks(path).items()}
    assert points == {name: place for name, place in found.items() if place is not None}


@pytest.mark.parametrize(("suffix", "others"), [("fcsv", 3 + 1), ("csv", 1), ("tsv", 1)])
def test_slicer_list_has_one_line_for_each_point(suffix: str, others: int, tmp_path: Path) -> None:
    """Its readers take each line for a point, whatever quotes are around it."""
    answer = answer_of({"a": (1.0, 2.0, 3.0), "b": (4.0, 5.0, 6.0)})
    lines = {"description": "left\n# upper\r\nlower"}
    described = [landmark.model_copy(update=lines) for landmark in answer.landmarks]
    changes = {"landmarks": described, "warnings": ["one\ntwo"]}
    content = write_answer(answer.model_copy(update=changes), suffix)
    path = tmp_path / f"scan.{suffix}"
    path.write_bytes(content)
    assert list(read_landmarks(path)) == ["a", "b"]
    assert content.count(b"\n") == others + 2
    assert content.count(b"left # upper lower") == 2


def test_slicer_list_has_a_long_warning_on_lines_that_its_reader_can_hold() -> None:
    warning = " ".join(["\N{BONE}" * 30] * 99)
    answer = answer_of({"a": (1.0, 2.0, 3.0)}).model_copy(update={"warnings": [warning]})
    content = write_fcsv(answer)
    assert max(map(len, content.split(b"\n"))) < 1024
    assert warning in content.decode().replace("\n# ", " ")


@pytest.mark.parametrize("letter", ['"', "\N{BONE}", "x"])
def test_slicer_list_has_a_long_description_as_far_as_its_reader_can_hold_a_line(
    letter: str,
) -> None:
    """It has 1024 bytes for one; landmarks may have descriptions of any length."""
    (landmark,) = answer_of({"a" * 128: (1.0, 2.0, 3.0)}).landmarks
    changes = {"description": letter * 1200, "region95_mm": 0.5}
    answer = answer_of({}).model_copy(update={"landmarks": [landmark.model_copy(update=changes)]})
    content = write_fcsv(answer)
    assert max(map(len, content.split(b"\n"))) < 1024
    (row,) = csv.reader(content.decode().splitlines()[-1:])
    assert row[12] == letter * (300 // len(letter.encode())) + "; 95 % within 0.5 mm"


def test_number_that_is_not_finite_becomes_null() -> None:
    (landmark,) = answer_of({"a": (1.0, 2.0, 3.0)}).landmarks
    assert landmark.coherence is None
    assert landmark.disagreement_mm is None
    assert landmark.lps_mm == (-1.0, -2.0, 3.0)


def test_candidates_are_null_unless_requested() -> None:
    assert answer_of({"a": None}).landmarks[0].candidates is None
    (candidate,) = answer_of({"a": None}, candidates=True).landmarks[0].candidates or []
    assert candidate.ras_mm == (1.0, 2.0, 3.0)
    assert candidate.lps_mm == (-1.0, -2.0, 3.0)


def test_markups_conform_to_the_schema_of_slicer() -> None:
    found = answer_of({"a": (1.0, -2.5, 3.0), "b": None})
    for text in (
        write_mrk_json(found).decode(),
        markups_json(["a", "b"], np.array([[1.0, -2.5, 3.0], [np.nan] * 3])),
    ):
        (markup,) = MarkupsFile.model_validate_json(text).markups
        assert [point.position for point in markup.control_points] == [[-1.0, 2.5, 3.0], None]
        assert (markup.type, markup.coordinate_system) == ("Fiducial", "LPS")


def test_confidence_is_a_measurement_of_the_markups() -> None:
    (markup,) = json.loads(write_mrk_json(answer_of({"a": (1.0, 2.0, 3.0), "b": None})))["markups"]
    (measurement,) = markup["measurements"]
    assert (measurement["name"], measurement["controlPointValues"]) == ("confidence", [0.75, 0.75])


def test_same_answer_gives_the_same_bytes() -> None:
    for form in FORMATS:
        assert form.write(answer_of({"a": None})) == form.write(answer_of({"a": None}))


@pytest.mark.parametrize(
    ("accept", "name"),
    [
        (None, "json"),
        ("*/*", "json"),
        ("text/csv", "csv"),
        ("text/*", "csv"),
        ("application/json;q=0.1, text/tab-separated-values", "tsv"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "json"),
        ("application/json;q=0, */*;q=0.5", "mrk.json"),
        ("TEXT/CSV;q=oops, application/json", "json"),
        ("application/json;q=nan, text/csv", "csv"),
    ],
)
def test_accept_header_is_ranked_by_quality(accept: str | None, name: str) -> None:
    assert negotiate_format(FORMATS, None, accept).name == name


@pytest.mark.parametrize(
    ("name", "accept"),
    [("png", None), (None, "image/png"), (None, "*/*;q=0"), (None, "text/event-stream")],
)
def test_unknown_format_is_refused(name: str | None, accept: str | None) -> None:
    with pytest.raises(UnknownFormat, match="expected"):
        negotiate_format(FORMATS, name, accept)


@pytest.mark.parametrize("form", WITH_POSITIONS, ids=lambda form: form.name)
def test_every_format_tells_a_doubtful_position_from_one_that_is_detected(
    form: AnswerFormat,
) -> None:
    """In Slicer's own files both looked alike, as it has no word for what is doubtful."""
    statuses = ("detected", "low_confidence", "out_of_field")
    found = answer_of({"a": (1.0, 2.0, 3.0), "b": (4.0, 5.0, 6.0), "c": None})
    marked = [
        one.model_copy(update={"status": status})
        for one, status in zip(found.landmarks, statuses, strict=True)
    ]
    written = form.write(found.model_copy(update={"landmarks": marked})).decode()
    for status in statuses[1:]:
        assert written.replace("_", " ").count(status.replace("_", " ")) == 1
    assert "; detected" not in written


@pytest.mark.parametrize("form", WITH_POSITIONS, ids=lambda form: form.name)
def test_every_format_tells_how_far_a_landmark_may_be_off(form: AnswerFormat) -> None:
    """Who read Slicer's own files alone was not told that regions are wide, as in noise."""
    found = answer_of({"a": (1.0, 2.0, 3.0)})
    (landmark,) = found.landmarks
    for radius_mm in (8.25, 0.000433):  # Of a spine, and of a cell.
        wide = landmark.model_copy(update={"region95_mm": radius_mm})
        written = form.write(found.model_copy(update={"landmarks": [wide]})).decode()
        assert str(radius_mm) in written
    placed = wide.model_copy(update={"region95_mm": None, "decided_by": "person"})
    assert "95 %" not in form.write(found.model_copy(update={"landmarks": [placed]})).decode()


@pytest.mark.parametrize("form", ["mrk.json", "fcsv"])
def test_what_is_measured_in_a_cell_is_not_rounded_to_nothing(form: str) -> None:
    """A length of half a micrometre was 0.00 mm, in an interval of 0.00 to 0.00."""
    width = schemas.MeasurementAnswer(
        name="width", description="", points=["a"], unit="mm", value=0.0005,
        interval95=(0.00041, 0.00059), reason="",
    )  # fmt: skip
    answer = answer_of({"a": (1.0, 2.0, 3.0)}).model_copy(update={"measurements": [width]})
    written = write_answer(answer, form).decode()
    assert "0.0005" in written
    assert "95 % interval 0.00041 to 0.00059" in written


@pytest.mark.parametrize("form", ["json", "fcsv", "long"])
def test_formats_with_room_for_warnings_have_them(form: str) -> None:
    assert "a warning" in write_answer(answer_of({"a": (1.0, 2.0, 3.0)}), form).decode()


def test_measurements_are_in_every_format_that_has_room_for_them() -> None:
    """Slicer's table of control points has none; `measurements` is a table of its own."""
    specs = [
        MeasurementSpec(name="width", kind="distance", points=("a", "b")),
        MeasurementSpec(name="height", kind="distance", points=("a", "c")),
    ]
    found = {"a": (0.0, 0.0, 0.0), "b": (3.0, 4.0, 0.0), "c": None}
    answer = answer_of(found, measurements=specs)
    width, height = answer.measurements
    assert width.value == pytest.approx(5.0)
    assert width.interval95 is not None
    assert width.interval95[0] < 5.0 < width.interval95[1]
    assert (height.value, height.interval95, height.reason) == (None, None, "not found: c")
    written = {form.name: form.write(answer).decode() for form in FORMATS}
    markups = MarkupsFile.model_validate_json(written["mrk.json"]).markups[0]
    assert [(one.name, one.value, one.units) for one in markups.measurements[1:]] == [
        ("width", width.value, "mm")
    ]
    assert "# width: 5 mm (95 % interval" in written["fcsv"]
    assert "# height: none (not found: c)" in written["fcsv"]
    assert read_fcsv(written["fcsv"].encode()).keys() == found.keys()
    rows = list(csv.DictReader(io.StringIO(written["measurements"])))
    assert [row["name"] for row in rows] == ["width", "height"]
    assert float(rows[0]["low95"]) == pytest.approx(width.interval95[0])
    assert rows[1]["value"] == ""
