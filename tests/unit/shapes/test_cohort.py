"""Landmark files of many specimens -> one array -> files of other programs."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.errors import BadParameter
from app.io import LandmarksAnswer, markups_json, write_answer
from app.io.slicer import write_fcsv, write_mrk_json, write_table
from app.shapes import COHORT_FORMATS, Cohort, read_cohort
from tests.support.answers import make_answer

POINTS = np.random.default_rng(2).uniform(-90, 90, (3, 4, 3))
POINTS[1, 2] = np.nan
POINTS[2, 3] = np.nan
POINTS[0, 3] = np.nan
POINTS[1, 3] = np.nan
NAMES = ("nose tip", "2", "left", "nowhere")
SPECIMENS = ("a b", "b'c", "d SCALED")
COHORT = Cohort(SPECIMENS, NAMES, POINTS)
WRITERS: dict[str, Callable[[LandmarksAnswer], bytes]] = {
    ".json": lambda answer: answer.model_dump_json().encode(),
    ".mrk.json": write_mrk_json,
    ".fcsv": write_fcsv,
    ".csv": write_table,
    ".tsv": lambda answer: write_table(answer, "\t"),
}


def write(folder: Path, suffix: str) -> Path:
    for name, points in zip(SPECIMENS, POINTS, strict=True):
        content = WRITERS[suffix](make_answer(NAMES, points))
        (folder / f"{name}{suffix}").write_bytes(content)
    return folder


@pytest.mark.parametrize("suffix", WRITERS)
def test_files_of_every_format_make_the_same_cohort(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no landmarks")
    (tmp_path / f"._{SPECIMENS[0]}{suffix}").write_bytes(b"\0\5\x16\7\xff")
    cohort = read_cohort(write(tmp_path, suffix))
    assert (cohort.specimens, cohort.landmarks) == (SPECIMENS, NAMES)
    assert_allclose(cohort.points, POINTS, atol=1e-9)
    assert cohort.count_missing() == 4


def test_one_table_of_all_scans_is_a_cohort_too(tmp_path: Path) -> None:
    lines: list[str] = []
    for name, points in zip(SPECIMENS, POINTS, strict=True):
        head, *rows = write_answer(make_answer(NAMES, points), "long").decode().splitlines()
        lines += [*([] if lines else [f"scan,{head}"]), *(f"{name},{row}" for row in rows)]
    (tmp_path / "all.csv").write_text("\n".join(lines))
    cohort = read_cohort(tmp_path / "all.csv")
    assert (cohort.specimens, cohort.landmarks) == (SPECIMENS, NAMES)
    assert_allclose(cohort.points, POINTS, atol=1e-9)
    (tmp_path / "all.csv").write_text("\n".join([*lines, lines[1]]))
    with pytest.raises(BadParameter, match="a b lists nose tip twice"):
        read_cohort(tmp_path / "all.csv")


@pytest.mark.parametrize("suffix", [".json", "table"])
def test_doubtful_points_are_told_and_left_out_if_asked(suffix: str, tmp_path: Path) -> None:
    """They were exported like any other, and nothing said how many there were."""
    whole = make_answer(NAMES, POINTS[2])
    doubted = whole.landmarks[1].model_copy(update={"status": "low_confidence"})
    answer = whole.model_copy(
        update={"landmarks": [*whole.landmarks[:1], doubted, *whole.landmarks[2:]]}
    )
    path = tmp_path
    if suffix == "table":
        head, *rows = write_answer(answer, "long").decode().splitlines()
        path = tmp_path / "all.csv"
        path.write_text("\n".join([f"scan,{head}", *(f"a,{row}" for row in rows)]))
    else:
        (tmp_path / "a.json").write_bytes(WRITERS[suffix](answer))
    kept, detected = read_cohort(path), read_cohort(path, detected_only=True)
    for cohort in (kept, detected):
        assert cohort.doubtful is not None
        assert cohort.doubtful.tolist() == [[False, True, False, False]]
        assert cohort.count_doubtful() == 1
    assert_allclose(kept.points[0], POINTS[2])
    assert np.isnan(detected.points[0, 1]).all()
    assert (kept.count_missing(), detected.count_missing()) == (1, 2)


def test_files_that_do_not_say_what_is_doubtful_are_not_taken_for_sure(tmp_path: Path) -> None:
    folder = write(tmp_path, ".mrk.json")
    assert read_cohort(folder).doubtful is None
    with pytest.raises(BadParameter, match="got files that do not say which"):
        read_cohort(folder, detected_only=True)
    table = tmp_path / "all.csv"
    table.write_text("scan,label,ras_x_mm,ras_y_mm,ras_z_mm\na,x,1,2,3\n")
    with pytest.raises(BadParameter, match="got files that do not say which"):
        read_cohort(table, detected_only=True)


def test_a_table_may_end_in_rows_of_commas_alone(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("scan,label,ras_x_mm,ras_y_mm,ras_z_mm\na,x,1,2,3\n,,,,\n,,,,\n")
    assert read_cohort(path).specimens == ("a",)


def test_a_table_that_r_wrote_again_is_read(tmp_path: Path) -> None:
    """Its ``write.csv`` puts a column of row numbers first, and NA where there is no number."""
    path = tmp_path / "all.csv"
    columns = '"","scan","label","ras_x_mm","ras_y_mm","ras_z_mm"'
    path.write_text(f'{columns}\n"1","a","x",1,2,3\n"2","a","y",NA,NA,NA\n')
    cohort = read_cohort(path)
    assert cohort.landmarks == ("x", "y")
    assert_allclose(cohort.points, np.array([[[1, 2, 3], [np.nan] * 3]]))


def test_a_table_with_other_separators_is_refused_with_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("scan;label;ras_x_mm;ras_y_mm;ras_z_mm\na;x;1,5;2;3\n")
    with pytest.raises(BadParameter, match=r"^all\.csv: expected .* got scan;label;ras_x_mm;"):
        read_cohort(path)


@pytest.mark.parametrize("row", ["measured by me", ",x,1,2,3", "b,,1,2,3"])
def test_a_row_of_a_table_without_scan_or_label_is_refused(row: str, tmp_path: Path) -> None:
    """A remark became a specimen, with a landmark None for all; NTS ended with a traceback."""
    path = tmp_path / "all.csv"
    path.write_text(f"scan,label,ras_x_mm,ras_y_mm,ras_z_mm\na,x,1,2,3\n{row}\n")
    with pytest.raises(BadParameter, match=r"^all\.csv, line 3: expected a scan and a label"):
        read_cohort(path)


@pytest.mark.parametrize("row", ["b,x,1,2", "b,x,1,2,", "b,x,1,NA,3", "b,x,inf,2,3", "b,x,one,2,3"])
def test_a_row_of_a_table_without_a_whole_point_is_refused(row: str, tmp_path: Path) -> None:
    """Such as the last one of a file that was copied in part."""
    path = tmp_path / "all.csv"
    path.write_text(f"scan,label,ras_x_mm,ras_y_mm,ras_z_mm\na,x,1,2,3\na,y\n{row}")
    got = ",".join(row.split(",")[2:])
    with pytest.raises(
        BadParameter, match=f"all.csv, line 4: expected three finite numbers, or none, got {got}"
    ):
        read_cohort(path)


@pytest.mark.parametrize(
    "row", ["M\xfcller,x,1,2,3".encode("latin-1"), b"a" * 200_000 + b",x,1,2,3"]
)
def test_a_table_that_is_no_text_in_utf8_is_refused(row: bytes, tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_bytes(b"scan,label,ras_x_mm,ras_y_mm,ras_z_mm\n" + row)
    with pytest.raises(BadParameter, match=r"^all\.csv: expected a table as CSV in UTF-8: "):
        read_cohort(path)


def test_files_without_any_landmark_are_no_cohort(tmp_path: Path) -> None:
    (tmp_path / "a.mrk.json").write_text(markups_json([], np.zeros((0, 3))))
    with pytest.raises(BadParameter, match="found none"):
        read_cohort(tmp_path)


def test_landmarks_that_some_specimens_do_not_list_are_missing_there(tmp_path: Path) -> None:
    (tmp_path / "a.mrk.json").write_text(markups_json(["x", "y"], POINTS[0, :2]))
    (tmp_path / "b.mrk.json").write_text(markups_json(["z", "y"], POINTS[1, :2]))
    cohort = read_cohort(tmp_path)
    assert cohort.landmarks == ("x", "y", "z")
    assert_allclose(cohort.points[1, 1:], POINTS[1, [1, 0]])
    assert np.isnan(cohort.points[1, 0]).all()


def test_what_is_no_cohort_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="expected a folder of landmark files, or a table"):
        read_cohort(tmp_path / "nowhere")
    with pytest.raises(BadParameter, match="found none"):
        read_cohort(tmp_path)
    for other in ("", "name,x,y,z\n1,0,0,0\n"):
        (tmp_path / "a.csv").write_text(other)
        with pytest.raises(BadParameter, match="expected a table with columns scan, label"):
            read_cohort(tmp_path / "a.csv")
    (tmp_path / "a.fcsv").write_text("# CoordinateSystem = LPS\n1,0,0,0,0,0,0,1,1,1,0,x,,,2,0\n")
    with pytest.raises(BadParameter, match="a twice"):
        read_cohort(tmp_path)
    (tmp_path / "a.fcsv").unlink()
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(BadParameter, match=r"b\.json: expected an answer"):
        read_cohort(tmp_path)
    (tmp_path / "b.json").unlink()
    (tmp_path / "b.mrk.json").write_text("{}")
    with pytest.raises(BadParameter, match=r"b\.mrk\.json"):
        read_cohort(tmp_path)


# Readers that follow those of geomorph 4 (readland.tps, read.morphologika, readland.nts) step by
# step; ``float`` reads NA as little as R's as.numeric does, so both make it missing.


def numbers(lines: list[str]) -> np.ndarray:
    values = [float("nan" if word == "NA" else word) for line in lines for word in line.split()]
    return np.array(values).reshape(-1, 3)


def read_tps(text: str) -> tuple[list[str], np.ndarray]:
    names, points = [], []
    for block in text.split("LM3=")[1:]:
        count, *lines = block.splitlines()
        parts = [part for line in lines if "SCALE" in line for part in line.split("SCALE=")]
        coordinates = numbers([line for line in lines if "=" not in line])
        points.append(float(parts[1]) * coordinates.reshape(int(count), 3))
        names += [line.removeprefix("ID=") for line in lines if "ID" in line]
    return names, np.stack(points)


def read_morphologika(text: str) -> tuple[list[str], np.ndarray]:
    lines = text.splitlines()

    def after(word: str) -> int:
        return next(number for number, line in enumerate(lines) if word in line) + 1

    specimens, landmarks = int(lines[after("individuals")]), int(lines[after("landmarks")])
    assert lines[after("dimensions")] == "3"
    start = after("rawpoints")
    raw = lines[start : start + specimens * (landmarks + 1)]
    coordinates = numbers([line for line in raw if "'" not in line])
    names = lines[after("names") : after("names") + specimens]
    return names, coordinates.reshape(specimens, landmarks, 3)


def read_nts(text: str) -> tuple[list[str], np.ndarray]:
    first, *lines = text.splitlines()
    header = first.split()
    assert header[0] == "1"
    assert "L" in header[1]
    assert "L" in header[2]
    specimens, variables = (int(word.rstrip("L")) for word in header[1:3])
    assert header[-1] == "DIM=3"
    words = " ".join(lines).split()
    names, values = words[:specimens], np.array(words[specimens + variables :], dtype=float)
    if header[3] != "0":
        values[values == float(header[4])] = np.nan
    return names, values.reshape(specimens, -1, 3)


def read_csv(text: str) -> tuple[list[str], np.ndarray]:
    rows = [line.split(",") for line in text.splitlines()]
    assert rows[0][:4] == ["specimen", "nose tip_x", "nose tip_y", "nose tip_z"]
    return [row[0] for row in rows[1:]], np.stack([numbers(row[1:]) for row in rows[1:]])


READERS = {"tps": read_tps, "morphologika": read_morphologika, "nts": read_nts, "csv": read_csv}


@pytest.mark.parametrize("name", COHORT_FORMATS)
def test_other_programs_read_what_was_written_and_what_is_missing(name: str) -> None:
    names, points = READERS[name](COHORT_FORMATS[name](COHORT))
    assert names == (list(SPECIMENS) if name == "csv" else ["a_b", "b_c", "d_SCALED"])
    assert_allclose(points, POINTS, atol=5e-7)
    assert not re.search(r"nan", COHORT_FORMATS[name](COHORT))


@pytest.mark.parametrize("name", COHORT_FORMATS)
def test_points_of_a_cell_are_written_to_a_thousandth_of_its_voxels(name: str) -> None:
    """Of voxels of 10 nm, six decimals of a millimetre tell tenths."""
    cell = Cohort(SPECIMENS, NAMES, 1e-5 * POINTS)
    _, points = READERS[name](COHORT_FORMATS[name](cell))
    assert_allclose(points, cell.points, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["tps", "morphologika", "nts"])
def test_names_that_would_become_one_are_refused(name: str) -> None:
    alike = Cohort(("a b", "c", "a,b"), NAMES, POINTS)
    with pytest.raises(BadParameter, match=r"got 'a b' and 'a,b', which both become a_b"):
        COHORT_FORMATS[name](alike)
    assert read_csv(COHORT_FORMATS["csv"](COHORT))[0] == list(SPECIMENS)


def test_nts_says_that_nothing_is_missing() -> None:
    whole = Cohort(SPECIMENS, NAMES[:2], POINTS[:, :2])
    text = COHORT_FORMATS["nts"](whole)
    assert text.startswith("1 3L 6L 0 DIM=3\n")
    assert_allclose(read_nts(text)[1], POINTS[:, :2], atol=5e-7)
