"""Landmark files of imaging tools, read into RAS mm."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.io.slicer import landmark_stem, read_landmarks


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def markup(system: str, points: list[Any]) -> str:
    return json.dumps({"markups": [{"coordinateSystem": system, "controlPoints": points}]})


@pytest.mark.parametrize(("system", "expected"), [("LPS", [-1, -2, 3]), ("RAS", [1, 2, 3])])
def test_markups_are_read_in_their_own_frame(
    tmp_path: Path, system: str, expected: list[float]
) -> None:
    path = write(tmp_path / "a.mrk.json", markup(system, [{"label": "n", "position": [1, 2, 3]}]))
    np.testing.assert_array_equal(read_landmarks(path)["n"], expected)


def test_undefined_point_is_left_out(tmp_path: Path) -> None:
    points = [{"label": "a", "positionStatus": "undefined"}, {"label": "b", "position": [1, 2, 3]}]
    path = write(tmp_path / "a.mrk.json", markup("LPS", points))
    assert list(read_landmarks(path)) == ["b"]


def test_fiducial_list_is_read_with_old_and_new_frame_names(tmp_path: Path) -> None:
    row = "id_1,1.5,2,3,0,0,0,1,1,1,0,nasion,,,"
    for system, expected in (("LPS", -1.5), ("1,,,", -1.5), ("RAS", 1.5), ("0,,,", 1.5)):
        text = f"# Markups fiducial file version = 4.11\n# CoordinateSystem = {system}\n{row}\n"
        point = read_landmarks(write(tmp_path / "a.fcsv", text))["nasion"]
        assert point[0] == expected


def test_fiducial_list_says_which_points_are_defined(tmp_path: Path) -> None:
    row = "1,1.5,2,3,0,0,0,1,1,1,0,point-{status},,,{status},0\n"
    text = "# CoordinateSystem = LPS\n" + "".join(row.format(status=n) for n in range(4))
    assert list(read_landmarks(write(tmp_path / "a.fcsv", text))) == ["point-2"]


@pytest.mark.parametrize("sign", ["\u2028", "\x85", "\x0b"])
def test_rows_do_not_end_at_signs_of_a_description(tmp_path: Path, sign: str) -> None:
    text = f"label,l,p,s,description\na,1,2,3,left{sign}upper\nb,1,2,3,\n"
    assert list(read_landmarks(write(tmp_path / "a.csv", text), undefined=True)) == ["a", "b"]
    row = f"1,1.5,2,3,0,0,0,1,1,1,0,nasion,left{sign}upper,,2,0\n"
    text = f"# CoordinateSystem = LPS\n{row}"
    assert list(read_landmarks(write(tmp_path / "a.fcsv", text))) == ["nasion"]


def test_fiducial_list_that_names_no_frame_is_refused(tmp_path: Path) -> None:
    """Left and right are exchanged in the other one, and programs differ in which they assume."""
    row = "1,1.5,2,3,0,0,0,1,1,1,0,nasion,,,2,0\n"
    with pytest.raises(ValueError, match="expected a line '# CoordinateSystem = LPS' or RAS"):
        read_landmarks(write(tmp_path / "a.fcsv", row))


def test_fiducial_list_of_other_columns_is_refused(tmp_path: Path) -> None:
    text = "# CoordinateSystem = LPS\n# columns = label,x,y,z,sel,vis\nnasion,1,2,3,1,1\n"
    with pytest.raises(ValueError, match="at least 12 columns, got 6"):
        read_landmarks(write(tmp_path / "a.fcsv", text))


@pytest.mark.parametrize(
    "columns", ["name\tx\ty\tz\nn\t-1\t-2\t3\n", "label\tr\ta\ts\nn\t-1\t-2\t3\n"]
)
def test_tables_are_read_by_their_column_names(tmp_path: Path, columns: str) -> None:
    lps = write(tmp_path / "a.csv", "label,l,p,s,defined\nn,1,2,3,1\nm,0,0,0,0\n")
    ras = write(tmp_path / "b.tsv", columns)
    assert list(read_landmarks(lps)) == ["n"]
    np.testing.assert_array_equal(read_landmarks(lps)["n"], read_landmarks(ras)["n"])


@pytest.mark.parametrize(
    "row", ["0,0,0,0.0", "0,0,0,False", "0,0,0,FALSE", ",,,1", ",,,", "NA,NA,NA,1", "nan,NaN,nan,1"]
)
def test_row_of_a_table_without_a_position_is_not_defined(tmp_path: Path, row: str) -> None:
    text = f"label,l,p,s,defined\nm,{row}\nn,1,2,3,True\n"
    assert list(read_landmarks(write(tmp_path / "a.csv", text))) == ["n"]


def test_rows_of_commas_alone_are_no_points(tmp_path: Path) -> None:
    text = "label,l,p,s,defined\nm,,,,\n,,,,\nn,1,2,3,True\n,,,,\n,,,,,\n"
    path = write(tmp_path / "a.csv", text)
    assert list(read_landmarks(path, undefined=True)) == ["m", "n"]
    with pytest.raises(ValueError, match="'' twice"):
        read_landmarks(write(path, "name,x,y,z\n,1,2,3\n,1,2,4\n"))


def test_unknown_frame_or_unit_is_refused(tmp_path: Path) -> None:
    lower = write(tmp_path / "a.mrk.json", markup("ras", [{"label": "n", "position": [1, 2, 3]}]))
    np.testing.assert_array_equal(read_landmarks(lower)["n"], [1, 2, 3])
    with pytest.raises(ValueError, match="expected coordinates in LPS or RAS, got 'IJK'"):
        read_landmarks(write(tmp_path / "b.mrk.json", markup("IJK", [])))
    with pytest.raises(ValueError, match="expected coordinates in LPS or RAS, got '2'"):
        read_landmarks(write(tmp_path / "c.fcsv", "# CoordinateSystem = 2\n"))
    micrometres = {"markups": [{"coordinateUnits": ["um", "um", "um"], "controlPoints": []}]}
    with pytest.raises(ValueError, match="expected coordinates in mm"):
        read_landmarks(write(tmp_path / "d.mrk.json", json.dumps(micrometres)))


@pytest.mark.parametrize("code", ["mm", "um"])
def test_unit_may_be_a_code_with_its_scheme_and_meaning(tmp_path: Path, code: str) -> None:
    """As the schema of 3D Slicer allows, and its reader takes it."""
    point = {"label": "n", "position": [1, 2, 3]}
    markups = [{"coordinateUnits": [code, "UCUM", "a unit"], "controlPoints": [point]}]
    path = write(tmp_path / "a.mrk.json", json.dumps({"markups": markups}))
    if code == "mm":
        np.testing.assert_array_equal(read_landmarks(path)["n"], [-1, -2, 3])
    else:
        with pytest.raises(ValueError, match="expected coordinates in mm, got"):
            read_landmarks(path)


def test_control_point_without_a_label_is_refused(tmp_path: Path) -> None:
    """Of curves, the points between are often not named."""
    markups = [{"controlPoints": [{"position": [1, 2, 3]}]}]
    path = write(tmp_path / "a.mrk.json", json.dumps({"markups": markups}))
    with pytest.raises(ValueError, match="nothing by the name of 'label'"):
        read_landmarks(path)


def test_duplicate_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "name,x,y,z\nn,1,2,3\nn,1,2,4\n")
    with pytest.raises(ValueError, match="'n' twice"):
        read_landmarks(path)


def test_coordinate_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "name,x,y,z\nn,1,nan,3\n")
    with pytest.raises(ValueError, match="finite"):
        read_landmarks(path)
    with pytest.raises(ValueError, match="'NA'"):
        read_landmarks(write(path, "name,x,y,z\nn,1,NA,3\n"))


def test_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.mrk\.json, .* got a\.vtk"):
        read_landmarks(write(tmp_path / "a.vtk", ""))


def test_stem_names_the_scan() -> None:
    assert landmark_stem(Path("x/skull_1.v2.mrk.json")) == "skull_1.v2"
    assert landmark_stem(Path("skull.csv")) == "skull"
