"""Scans that a model was trained on do not measure it."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli.main import app
from app.training.data.specimens import pair_files
from app.training.evaluate.leakage import describe_leaked, find_leaked
from app.training.files import RECORD
from tests.support.training_data import SMALL, TILES, landmarkd, write_specimen, write_specimens


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model on one of three scans, and one with folds."""
    folder = write_specimens(tmp_path_factory.mktemp("data"), "one", "two", "three")
    files = (folder / "scans", folder / "landmarks")
    landmarkd("train", *files, "-o", folder / "mine", *TILES, "--validate", "two,three")
    landmarkd("train", *files, "-o", folder / "crossed", *TILES, "--folds", 3)
    return folder


def run(data: Path, command: str, model: str, *words: object) -> Result:
    where = ("--scans", data / "scans", "--landmarks", data / "landmarks", "--device", "cpu")
    return CliRunner().invoke(app, [str(word) for word in (command, data / model, *where, *words)])


def leaked(data: Path, model: str) -> list[str]:
    return find_leaked(data / model, pair_files(data / "scans", data / "landmarks"))


@pytest.mark.no_cover
def test_a_measurement_names_the_scans_that_the_model_was_trained_on(
    data: Path, tmp_path: Path
) -> None:
    result = run(data, "evaluate", "mine", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    output = "the model was trained on one: its error on such scans is not that on unseen ones"
    assert result.stderr.strip().splitlines()[-1] == output
    page = (tmp_path / "report.html").read_text()
    assert output in page
    assert "<td>one (trained on)</td>" in page
    assert "<td>two</td>" in page


def test_a_measurement_of_unseen_scans_warns_of_nothing(data: Path, tmp_path: Path) -> None:
    result = run(data, "evaluate", "mine", "--only", "two", "--only", "three", "-o", tmp_path)
    assert "trained on" not in result.output
    assert "trained on" not in (tmp_path / "report.html").read_text()


def test_a_calibration_by_scans_that_the_model_was_trained_on_is_refused(data: Path) -> None:
    before = (data / "mine" / "model.toml").read_bytes()
    result = run(data, "calibrate", "mine", "--only", "one", "--only", "two")
    assert result.exit_code != 0
    text = " ".join(result.output.replace("│", " ").split()) + str(result.exception)
    assert "was trained on one: leave them out" in text
    assert (data / "mine" / "model.toml").read_bytes() == before
    result = run(data, "calibrate", "mine", "--only", "three", "--only", "two")
    assert "trained on" not in result.output + str(result.exception)


def test_what_either_network_was_trained_on_counts(data: Path, tmp_path: Path) -> None:
    files = (data / "scans", data / "landmarks")
    words = SMALL
    landmarkd("train", *files, "-o", tmp_path / "two", *words, "--validate", "two,three")
    landmarkd("refine", tmp_path / "two", *files, "--spacing", 1, *words, "--validate", "one,two")
    assert find_leaked(tmp_path / "two", pair_files(*files)) == ["one", "three"]


def test_what_the_weights_that_it_started_from_have_seen_counts(data: Path, tmp_path: Path) -> None:
    files = (data / "scans", data / "landmarks")
    words = (*TILES, "--validate", "one,two", "--start")
    landmarkd("train", *files, "-o", tmp_path / "next", *words, data / "mine")
    landmarkd("train", *files, "-o", tmp_path / "last", *words, tmp_path / "next")
    assert find_leaked(tmp_path / "last", pair_files(*files)) == ["one", "three"]


def test_a_model_knows_its_scans_by_any_name(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    for inner, ending in (("scans", "nii.gz"), ("landmarks", "csv")):
        (tmp_path / inner / f"one.{ending}").rename(tmp_path / inner / f"another.{ending}")
    write_specimen(tmp_path, "strange", 9)
    assert leaked(tmp_path, "crossed") == ["another", "three", "two"]
    assert leaked(tmp_path, "mine") == ["another"]
    (tmp_path / "scans" / "another.nii.gz").write_bytes(b"no scan at all")
    assert leaked(tmp_path, "mine") == []
    assert leaked(tmp_path, "crossed") == ["three", "two"]


def test_a_model_knows_its_scans_by_any_name_and_landmarks_and_so_do_later_ones(
    data: Path, tmp_path: Path
) -> None:
    """Such a scan, once corrected and kept, could be held out to judge what it had taught."""
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    for inner, ending in (("scans", "nii.gz"), ("landmarks", "csv")):
        (tmp_path / inner / f"one.{ending}").rename(tmp_path / inner / f"another.{ending}")
    path = tmp_path / "landmarks" / "another.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert leaked(tmp_path, "mine") == ["another"]
    files = (data / "scans", data / "landmarks")
    start = ("--start", tmp_path / "mine")
    landmarkd("train", *files, "-o", tmp_path / "next", *TILES, "--validate", "one,two", *start)
    assert leaked(tmp_path, "next") == ["another", "three"]


@pytest.mark.parametrize("command", ["evaluate", "calibrate"])
def test_a_model_without_a_record_cannot_tell(data: Path, tmp_path: Path, command: str) -> None:
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    message = "mine has no recipe.json, so it cannot be told which scans the model was trained on"
    assert message not in run(tmp_path, command, "mine", "--only", "two").stderr
    (tmp_path / "mine" / RECORD).unlink()
    assert leaked(tmp_path, "mine") == []
    assert describe_leaked([]) == ""
    assert message in run(tmp_path, command, "mine", "--only", "two").stderr
