"""Landmark files of kept cases: what Slicer, training and learning read in them."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.errors import BadParameter
from app.io import (
    CaseAnswer,
    Volume,
    correct,
    pack_scan,
    read_case,
    read_landmarks,
    read_placed,
    read_truth,
    read_volume,
    write_case,
    write_nifti,
)
from app.io.schemas import LandmarkAnswer, LandmarksAnswer
from tests.support.cancelling import NobodyWaitsError, cancelled_after
from tests.support.file_reads import count_reads
from tests.support.nifti_files import AFFINE, counting
from tests.support.slicer_markups import MarkupsFile
from tests.unit.io.test_formats import answer_of


def kept(tmp_path: Path) -> tuple[Path, CaseAnswer]:
    """Write a case of five points: placed, accepted, absent, unjudged and sure, and not found."""
    places = {name: (float(at), 2.0, 3.0) for at, name in enumerate("abcd")}
    answer: LandmarksAnswer = answer_of({**places, "e": None})
    placed, accepted, absent, unjudged, missing = answer.landmarks

    def judge(landmark: LandmarkAnswer, **changes: object) -> LandmarkAnswer:
        return landmark.model_copy(update={"decided_by": "person", **changes})

    gone = {"ijk": None, "ras_mm": None, "lps_mm": None, "status": "not_found", "confidence": None}
    landmarks = [
        judge(placed, confidence=None, region95_mm=None),
        judge(accepted, region95_mm=0.6),
        judge(absent, **gone),
        unjudged.model_copy(update={"region95_mm": None}),
        missing,
    ]
    answer = answer.model_copy(update={"landmarks": landmarks})
    case = CaseAnswer(
        id="0" * 32, model=answer.model, kept="2026-01-01T00:00:00+00:00", key="anna", placed=1,
        accepted=1, absent=1, unjudged=2,
    )  # fmt: skip
    path = tmp_path / "case.mrk.json"
    path.write_bytes(write_case(answer, case))
    return path, case


def test_case_is_read_back(tmp_path: Path) -> None:
    path, case = kept(tmp_path)
    assert read_case(path) == case


def test_absent_points_are_told_from_unknown_ones(tmp_path: Path) -> None:
    path, _ = kept(tmp_path)
    truth = read_truth(path)
    assert list(read_landmarks(path)) == ["a", "b", "d"]
    assert {name: point is None for name, point in truth.items()} == {
        "a": False, "b": False, "c": True, "d": False,
    }  # fmt: skip


def test_points_that_a_person_has_placed_are_told_from_those_that_were_left(tmp_path: Path) -> None:
    path, case = kept(tmp_path)
    assert read_placed(path, case.model.version) is None
    assert read_placed(path, "0.9.0") == frozenset("ac")
    document = json.loads(path.read_bytes())
    (markup,) = document["markups"]
    del markup["controlPoints"][1]["landmarkd"]  # As of a point that was placed in Slicer.
    path.write_text(json.dumps(document))
    assert read_placed(path, "0.9.0") == frozenset("abc")
    del markup["landmarkd"]
    path.write_text(json.dumps(document))
    assert read_placed(path, "0.9.0") is None
    assert read_placed(tmp_path / "case.fcsv", "0.9.0") is None


def test_truth_is_read_from_its_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = kept(tmp_path)
    read = count_reads(monkeypatch)
    assert len(read_truth(path)) == 4
    assert read == [path]


def test_point_that_slicer_marks_as_missing_is_absent(tmp_path: Path) -> None:
    path, _ = kept(tmp_path)
    document = json.loads(path.read_text())
    points = document["markups"][0]["controlPoints"]
    for point in points:
        del point["landmarkd"]
    points[4]["positionStatus"] = "missing"
    path.write_text(json.dumps(document))
    assert {name for name, point in read_truth(path).items() if point is None} == {"e"}


def test_point_that_a_fiducial_list_says_is_missing_is_absent(tmp_path: Path) -> None:
    row = "1,1,2,3,0,0,0,1,1,1,0,{name},,,{status},0\n"
    path = tmp_path / "points.fcsv"
    rows = "".join(row.format(name=f"p{n}", status=n) for n in range(4))
    path.write_text(f"# CoordinateSystem = LPS\n{rows}")
    assert {name: point is None for name, point in read_truth(path).items()} == {
        "p2": False, "p3": True,
    }  # fmt: skip


def test_other_landmark_files_have_no_absent_points(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("name,x,y,z\na,1,2,3\n")
    assert all(point is not None for point in read_truth(path).values())


def test_kept_file_conforms_to_the_schema_of_slicer_but_for_keys_of_our_own(
    tmp_path: Path,
) -> None:
    path, _ = kept(tmp_path)
    document = json.loads(path.read_text())
    (markup,) = document["markups"]
    for part in (markup, *markup["controlPoints"]):
        part.pop("landmarkd")
    MarkupsFile.model_validate(document)


def test_nifti_is_read_back_with_its_type() -> None:
    for dtype in ("uint8", "int16", "int64", "float32", "float64"):
        voxels = counting(dtype=dtype)
        volume = read_volume(write_nifti(voxels, AFFINE))
        np.testing.assert_array_equal(volume.voxels, voxels)
        assert volume.voxels.dtype == dtype
        assert_allclose(volume.affine, AFFINE, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "written"),
    [("bool", "uint8"), ("float16", "float32"), (">f2", "float32"), (">f4", "float32")],
)
def test_types_that_nifti_lacks_are_written_as_wider_ones(dtype: str, written: str) -> None:
    """An image of napari may have any type."""
    voxels: np.ndarray = (counting() / 7).astype(dtype)
    volume = read_volume(write_nifti(voxels, AFFINE))
    np.testing.assert_array_equal(volume.voxels, voxels)
    assert volume.voxels.dtype == written


def test_scan_is_packed_a_piece_at_a_time() -> None:
    voxels = np.zeros((160, 150, 140), np.int64, order="F")  # 27 MB
    volume = Volume(voxels, AFFINE)
    with pytest.raises(NobodyWaitsError):
        pack_scan(b"", volume, cancelled_after(2), as_uploaded=False, dtype=np.float32)
    tracemalloc.start()
    try:
        pack_scan(b"", volume, lambda: None, as_uploaded=False, dtype=np.float32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < voxels.nbytes / 8


def test_person_places_accepts_and_misses_landmarks() -> None:
    affine = np.array([[0, -2, 0, 9], [3, 0, 0, -4], [0, 0.1, 1, 2], [0, 0, 0, 1.0]])
    answer = answer_of(
        {"a": (1.0, 2.0, 3.0), "b": (1.0, 2.0, 3.0), "c": None, "d": (0.0, 0.0, 0.0)}
    )
    rows = tuple(tuple(row) for row in affine.tolist())
    answer = answer.model_copy(update={"volume": answer.volume.model_copy(update={"affine": rows})})
    doubtful = answer.landmarks[1].model_copy(update={"status": "low_confidence"})
    answer = answer.model_copy(
        update={"landmarks": [*answer.landmarks[:1], doubtful, *answer.landmarks[2:]]}
    )
    corrected = correct(
        answer, {"a": None, "b": (1.0, 2.0, 3.0004), "c": np.array([5.0, 2.0, 2.2])}
    )
    absent, accepted, placed, unjudged = corrected.landmarks
    assert [one.decided_by for one in corrected.landmarks] == ["person"] * 3 + ["network"]
    assert (absent.status, absent.ras_mm, absent.confidence) == ("not_found", None, None)
    assert (accepted.status, accepted.ras_mm) == ("detected", (1.0, 2.0, 3.0))
    assert accepted.confidence == doubtful.confidence is not None
    assert (placed.status, placed.confidence, placed.lps_mm) == (
        "detected",
        None,
        (-5.0, -2.0, 2.2),
    )
    assert placed.ijk is not None
    assert_allclose(placed.ijk, (2.0, 2.0, 0.0), atol=1e-12)
    assert unjudged == answer.landmarks[3]


def test_position_a_voxel_beside_that_of_the_network_is_no_acceptance_of_it() -> None:
    """Not of a scan with voxels of half a micrometre either."""
    answer = answer_of({"a": (0.1, 0.2, 0.3), "b": (0.1, 0.2, 0.3)})
    rows = tuple(map(tuple, np.diag([5e-4, 5e-4, 5e-4, 1]).tolist()))
    answer = answer.model_copy(update={"volume": answer.volume.model_copy(update={"affine": rows})})
    placed, accepted = correct(
        answer, {"a": (0.1005, 0.2, 0.3), "b": (0.10001, 0.2, 0.3)}
    ).landmarks
    assert (placed.ras_mm, placed.confidence) == ((0.1005, 0.2, 0.3), None)
    assert (accepted.ras_mm, accepted.confidence) == (
        (0.1, 0.2, 0.3),
        answer.landmarks[1].confidence,
    )


@pytest.mark.parametrize("points", [{"z": None}, {"a": (1.0, 2.0)}, {"a": (1.0, 2.0, np.nan)}])
def test_what_is_no_landmark_or_position_is_no_correction(
    points: dict[str, Sequence[float] | None],
) -> None:
    with pytest.raises(BadParameter, match="expected"):
        correct(answer_of({"a": (1.0, 2.0, 3.0)}), points)
