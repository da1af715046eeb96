"""``landmarkd export``."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from app.cli import export as command
from app.cli.main import app
from app.errors import BadParameter, StartupError
from app.io import markups_json
from tests.support.full_disk import limited_files

NAMES = list("123456")
SHAPE = np.random.default_rng(6).uniform(-9, 9, (6, 3))


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    folder = tmp_path / "answers"
    folder.mkdir()
    for number in range(4):
        points = SHAPE + 0.1 * number
        points[number] = np.nan
        (folder / f"s{number}.mrk.json").write_text(markups_json(NAMES, points))
    return folder


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)], catch_exceptions=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize(
    ("name", "first"),
    [("all.tps", "LM3=6"), ("all.nts", "1 4L 18L 1 -9999 DIM=3"), ("all.csv", "specimen,1_x,")],
)
def test_the_suffix_of_the_output_chooses_the_format(
    answers: Path, tmp_path: Path, name: str, first: str
) -> None:
    assert not run(answers, "-o", tmp_path / name)
    assert (tmp_path / name).read_text().startswith(first)


def test_without_an_output_a_named_format_goes_to_standard_output(answers: Path) -> None:
    assert run(answers, "--format", "morphologika").startswith("[individuals]\n4\n")


@pytest.mark.parametrize("form", ["tps", "morphologika", "nts", "csv"])
def test_a_file_whose_name_is_no_utf_8_is_exported(
    answers: Path, tmp_path: Path, form: str
) -> None:
    (answers / "s0.mrk.json").rename(answers / os.fsdecode(b"Caf\xe9.mrk.json"))
    run(answers, "--format", form, "-o", tmp_path / "all", "--report", tmp_path / "shapes")
    for path in (tmp_path / "all", tmp_path / "shapes" / "scores.csv"):
        assert re.search(r"Caf(\\|_)xe9", path.read_text(encoding="utf-8"))


def test_a_report_needs_no_format(answers: Path, tmp_path: Path) -> None:
    run(answers, "--report", tmp_path / "shapes")
    names = {path.name for path in (tmp_path / "shapes").iterdir()}
    assert names == {"report.html", "scores.csv", "mean_shape.mrk.json"}


def test_nothing_is_read_before_it_is_known_what_for(answers: Path, tmp_path: Path) -> None:
    for words in ([], ["-o", tmp_path / "all.txt"]):
        with pytest.raises(BadParameter, match="--format: expected one of tps"):
            run(answers / "nowhere", *words)
    assert not (tmp_path / "all.txt").exists()


def test_the_table_that_is_read_is_not_written_over(tmp_path: Path) -> None:
    """It may be hours of detection, and its name is what the export would naturally have."""
    table, link, name = (tmp_path / file for file in ("all.csv", "link.csv", "name.csv"))
    content = "scan,label,ras_x_mm,ras_y_mm,ras_z_mm\na,x,1,2,3\n"
    table.write_text(content)
    link.symlink_to(table)
    name.hardlink_to(table)
    for output in (table, link, name):
        with pytest.raises(BadParameter, match=r"-o: expected another file than the one"):
            run(table, "-o", output)
    assert table.read_text() == content


def test_nothing_is_written_where_it_would_count_as_an_answer(answers: Path) -> None:
    """It replaced a person's landmarks, or else ended the next export as no landmark file."""
    there = {path: path.read_bytes() for path in answers.iterdir()}
    for words in (
        ("-o", answers / "all.csv"),
        ("-o", answers / "s1.mrk.json", "--format", "tps"),
        ("-o", answers / "s1.json", "--format", "tps"),
        ("--report", answers),
    ):
        with pytest.raises(BadParameter, match="expected another folder than the one that is read"):
            run(answers, *words)
    assert {path: path.read_bytes() for path in answers.iterdir()} == there
    run(answers, "-o", answers / "all.tps")


def test_what_is_there_stays_where_there_is_no_room(answers: Path, tmp_path: Path) -> None:
    """A part took the place of the export before, and no file was named."""
    run(answers, "-o", tmp_path / "all.tps", "--report", tmp_path / "shapes")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with limited_files(100):
        for words in (("-o", tmp_path / "all.tps"), ("--report", tmp_path / "shapes")):
            with pytest.raises(OSError, match=r"File too large: '.*(all\.tps|shapes/)"):
                run(answers, *words)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_link_to_itself_is_refused_as_what_is_not_there(answers: Path, tmp_path: Path) -> None:
    """It ended the command with a trace."""
    loop = tmp_path / "loop.tps"
    loop.symlink_to(loop)
    with pytest.raises(BadParameter, match="expected a folder of landmark files, or a table"):
        run(loop, "-o", tmp_path / "all.tps")
    run(answers, "-o", loop)
    assert loop.read_text().startswith("LM3=6")


def test_a_report_says_which_packages_it_misses(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "scipy" else name)
    with pytest.raises(StartupError, match=r"--report needs scipy: pip install"):
        run(answers, "--report", tmp_path / "shapes")


def test_doubtful_points_are_counted_and_left_out_if_asked(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text(
        "scan,label,status,ras_x_mm,ras_y_mm,ras_z_mm\n"
        "a,x,detected,1,2,3\na,y,low_confidence,4,5,6\na,z,not_found,,,\n"
    )
    for words, said, row in (
        ((), "1 points missing, 1 doubtful (--detected-only leaves them out)", "4.000000000"),
        (("--detected-only",), "2 points missing, 1 of them doubtful", "NA"),
    ):
        path = str(tmp_path / "all.csv")
        result = CliRunner().invoke(app, ["export", path, "--format", "csv", *words])
        assert said in result.stderr
        assert result.stdout.splitlines()[1].split(",")[4] == row
