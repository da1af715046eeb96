"""One table of all scans, as it was left by a run that ended, or by a spreadsheet."""

import csv
from pathlib import Path

import numpy as np
import pytest

from app.cli.batch import LongTable, Sink
from app.cli.outputs import choose_sink, output_format
from app.errors import BadParameter
from app.io import LandmarksAnswer, MeasurementAnswer
from app.shapes import read_cohort
from tests.support.answers import make_answer
from tests.support.full_disk import limited_files

NAMES = {Path("one.nii"): "one", Path("ä.nii"): "ä"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "all.csv"
    resume(path)
    return path


def resume(table: Path) -> None:
    sink = LongTable(table, NAMES, resume=True)
    for path in NAMES:
        if not sink.has(path):
            sink.write(path, make_answer(["a", "b"], np.eye(3)[:2]))


def test_a_table_that_was_cut_off_within_a_letter_is_resumed(table: Path) -> None:
    whole = table.read_bytes()
    table.write_bytes(whole[: whole.index("ä".encode()) + 1])
    resume(table)
    assert table.read_bytes() == whole


@pytest.mark.parametrize("kept", range(1, len("mouse12,")))
def test_a_table_that_was_cut_off_within_a_name_is_resumed(tmp_path: Path, kept: int) -> None:
    """The scan was taken for answered, and lacked its last landmarks."""
    table, names = tmp_path / "all.csv", {Path(name): name for name in ("mouse1", "mouse12")}
    for _ in range(2):
        sink = LongTable(table, names, resume=True)
        for path in names:
            if not sink.has(path):
                sink.write(path, make_answer(["a", "b"], np.eye(3)[:2]))
        whole = table.read_bytes()
        table.write_bytes(whole[: whole.rindex(b"mouse12") + kept])
    assert whole.count(b"\nmouse1,") == whole.count(b"\nmouse12,") == 2


def test_a_scan_with_a_carriage_return_in_its_name_is_resumed_and_read(tmp_path: Path) -> None:
    """As of files that are named by a list from Windows; it made the whole table unreadable."""
    table, names = tmp_path / "all.csv", {Path("a\r.nii"): "a\r", Path("b.nii"): "b"}
    for there in (False, True):
        sink = LongTable(table, names, resume=True)
        assert sink.has(Path("a\r.nii")) == there
        for path in names:
            if not sink.has(path):
                sink.write(path, make_answer(["1", "2"], np.eye(3)[:2]))
    assert read_cohort(table).specimens == (r"a\r", "b")


def test_a_description_of_several_lines_stays_one_cell(tmp_path: Path) -> None:
    """One with a carriage return alone, as of an old Mac, ended the command in a traceback.

    A resumed run wrote ends of its lines as those of Unix.
    """
    table, told = tmp_path / "all.csv", 'old\rMac, "Windows"\r\nUnix\n'
    answer = make_answer(["a"], np.eye(3)[:1])
    point = answer.landmarks[0].model_copy(update={"description": told})
    for path, name in NAMES.items():
        sink = LongTable(table, {path: name}, resume=True)
        sink.write(path, answer.model_copy(update={"landmarks": [point]}))
    with table.open(encoding="utf-8", newline="") as file:
        assert [row["description"] for row in csv.DictReader(file)] == [told, told]


def test_rows_that_are_kept_stay_where_there_is_no_room(table: Path) -> None:
    """The table was emptied before it was written again, and what did not fit was gone."""
    whole = table.read_bytes()
    table.write_bytes(whole[:-1])
    with limited_files(100), pytest.raises(OSError, match="File too large"):
        resume(table)
    assert table.read_bytes() == whole[:-1]
    resume(table)
    assert table.read_bytes() == whole


@pytest.mark.parametrize("lines", [2, 3, 100])
def test_a_table_that_a_spreadsheet_saved_is_resumed(table: Path, lines: int) -> None:
    whole = table.read_text(encoding="utf-8")
    some = "".join(whole.splitlines(keepends=True)[:lines])
    table.write_text(some, encoding="utf-8-sig", newline="\r\n")
    resume(table)
    assert table.read_text(encoding="utf-8-sig") == whole


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_table_in_another_encoding_is_refused_and_kept(table: Path, encoding: str) -> None:
    content = table.read_text(encoding="utf-8").encode(encoding)
    table.write_bytes(content)
    with pytest.raises(BadParameter, match="expected a table in UTF-8"):
        resume(table)
    assert table.read_bytes() == content


def test_a_table_with_a_quotation_mark_too_many_is_refused_and_kept(table: Path) -> None:
    content = table.read_bytes() + b'"' + b"one,a\n" * 30_000
    table.write_bytes(content)
    with pytest.raises(
        BadParameter, match=r"--resume: expected a table as CSV, got .*field larger"
    ):
        resume(table)
    assert table.read_bytes() == content


def test_a_table_with_a_row_of_another_length_is_refused_and_kept(table: Path) -> None:
    content = table.read_bytes() + b"x\n"
    table.write_bytes(content)
    with pytest.raises(BadParameter, match=r"columns in each row of .*, got 1"):
        resume(table)
    assert table.read_bytes() == content


@pytest.mark.parametrize("change", ["added", "moved", "left out", "added at the end", "cut off"])
def test_a_table_of_other_columns_is_refused_and_kept(table: Path, change: str) -> None:
    """As a person leaves it who adds the sex of each: what is appended would be shifted."""
    rows = [line.split(",") for line in table.read_text(encoding="utf-8").splitlines()]
    changed = {
        "added": [[*row[:2], "f", *row[2:]] for row in rows],
        "moved": [[*row[:2], row[3], row[2], *row[4:]] for row in rows],
        "left out": [row[:12] + row[13:] for row in rows],
        "added at the end": [[*row, "f"] for row in rows],
        "cut off": [rows[0][:12]],
    }[change]
    content = "\n".join(map(",".join, changed)).encode() + b"\n" * (change != "cut off")
    table.write_bytes(content)
    with pytest.raises(BadParameter, match=r"with the columns scan,label,.*,version; got scan,"):
        resume(table)
    assert table.read_bytes() == content


@pytest.mark.parametrize("lacking", [("warnings",), ("warnings", "model", "version")])
def test_a_table_of_an_older_release_is_resumed(table: Path, lacking: tuple[str, ...]) -> None:
    rows = [line.split(",") for line in table.read_text(encoding="utf-8").splitlines()]
    kept = [at for at, name in enumerate(rows[0]) if name not in lacking]
    table.write_text(
        "".join(",".join(row[at] for at in kept) + "\n" for row in rows), encoding="utf-8"
    )
    sink = LongTable(table, {Path("b.nii"): "b"}, resume=True)
    assert sink.models() == (set() if "model" in lacking else {("m", "1")})
    answer = make_answer(["a"], np.eye(3)[:1]).model_copy(update={"warnings": ["noisy", "tilted"]})
    sink.write(Path("b.nii"), answer)
    with table.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert [(one["scan"], one["warnings"]) for one in found] == [
        ("one", ""), ("one", ""), ("ä", ""), ("ä", ""), ("b", "noisy | tilted"),
    ]  # fmt: skip
    assert list(found[0]) == rows[0]
    assert read_cohort(table).specimens == ("one", "ä", "b")


LORDOSIS = MeasurementAnswer(
    name="lordosis", description="", points=["a"], unit="deg", value=50.5,
    interval95=(44.0, 57.0), reason="",
)  # fmt: skip
RATIO = MeasurementAnswer(
    name="ratio, of two", description="", points=["a"], unit="", value=None, interval95=None,
    reason="not found: b",
)  # fmt: skip


def measured(*measurements: MeasurementAnswer) -> LandmarksAnswer:
    told = {"measurements": list(measurements), "warnings": ["unlike others", "noisy"]}
    return make_answer(["a"], np.zeros((1, 3))).model_copy(update=told)


def wide(table: Path, *, there: bool) -> Sink:
    form = output_format("all.csv", "wide", to_folder=True)
    return choose_sink(list(NAMES), table, form, lambda *_: b"", to_folder=True, resume=there)


def test_measurements_of_all_scans_make_a_row_for_each_scan_that_is_resumed(tmp_path: Path) -> None:
    table, answer = tmp_path / "all.csv", measured(LORDOSIS, RATIO)
    for there in (False, True):
        sink = wide(table, there=there)
        assert sink.has(Path("one.nii")) == there
        assert sink.models() == ({("m", "1")} if there else set())
        for path in NAMES:
            if not sink.has(path):
                sink.write(path, answer)
        row = '50.5,,44.0,57.0,,,"ratio, of two: not found: b",unlike others | noisy,m,1'
        assert table.read_text(encoding="utf-8").splitlines() == [
            'scan,lordosis_deg,"ratio, of two",lordosis_deg_low95,lordosis_deg_high95,'
            '"ratio, of two_low95","ratio, of two_high95",reasons,warnings,model,version',
            f"one,{row}",
            f"ä,{row}",
        ]
        whole = table.read_bytes()
        table.write_bytes(whole[:-20])


def test_rows_of_other_measurements_are_in_no_table_of_one_row_for_each_scan(
    tmp_path: Path,
) -> None:
    """They would stand in the columns of others."""
    table = tmp_path / "all.csv"
    wide(table, there=False).write(Path("one.nii"), measured(LORDOSIS))
    whole = table.read_bytes()
    sink = wide(table, there=True)
    with pytest.raises(BadParameter, match="expected the same measurements"):
        sink.write(Path("ä.nii"), measured(RATIO))
    assert table.read_bytes() == whole
    table.write_bytes(whole.replace(b",version", b",version,sex"))
    with pytest.raises(BadParameter, match=r"columns scan,.*,reasons,warnings,model,version; got"):
        wide(table, there=True)


def test_measurements_of_all_scans_make_one_table_that_is_resumed(tmp_path: Path) -> None:
    """Each scan had a file of its own, in which no column said whose it was."""
    table, form = tmp_path / "all.csv", output_format("all.csv", "measurements", to_folder=True)
    answer = measured(LORDOSIS)
    for there in (False, True):
        sink = choose_sink(list(NAMES), table, form, lambda *_: b"", to_folder=True, resume=there)
        assert sink.has(Path("one.nii")) == there
        for path in NAMES:
            if not sink.has(path):
                sink.write(path, answer)
        assert table.read_text(encoding="utf-8").splitlines() == [
            "scan,name,value,unit,low95,high95,reason,description,warnings,model,version",
            "one,lordosis,50.5,deg,44.0,57.0,,,unlike others | noisy,m,1",
            "ä,lordosis,50.5,deg,44.0,57.0,,,unlike others | noisy,m,1",
        ]
    with pytest.raises(BadParameter, match=r"with the columns scan,label,.*; got scan,name,"):
        resume(table)
