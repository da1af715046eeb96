"""Scans that a model has learned from do not judge it."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli.main import app
from app.training.evaluate.leakage import learned_from, warning_of
from app.training.evaluate.outcomes import choose_pairs
from app.training.files import RECORD
from tests.support.training_data import landmarkd
from tests.unit.training.test_train import write_specimen

SMALL = ("--filters", "4,4,8", "--batch", 1, "--device", "cpu", "--steps", 1)
TILES = (*SMALL, "--tile", 16, "--spacing", 1.5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model on one of three scans, and one with folds."""
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("one", "two", "three")):
        write_specimen(folder, name, seed)
    files = (folder / "scans", folder / "landmarks")
    landmarkd("train", *files, "-o", folder / "mine", *TILES, "--validate", "two,three")
    landmarkd("train", *files, "-o", folder / "crossed", *TILES, "--folds", 3)
    return folder


def run(data: Path, command: str, model: str, *words: object) -> Result:
    where = ("--scans", data / "scans", "--landmarks", data / "landmarks", "--device", "cpu")
    return CliRunner().invoke(app, [str(word) for word in (command, data / model, *where, *words)])


def seen(data: Path, model: str) -> list[str]:
    return learned_from(data / model, choose_pairs(data / "scans", data / "landmarks"))


def test_a_measurement_names_the_scans_that_the_model_has_learned_from(
    data: Path, tmp_path: Path
) -> None:
    result = run(data, "evaluate", "mine", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    told = "the model has learned from one: the error of such scans is not that of unseen ones"
    assert result.stderr.strip().splitlines()[-1] == told
    page = (tmp_path / "report.html").read_text()
    assert told in page
    assert "<td>one (learned from)</td>" in page
    assert "<td>two</td>" in page


def test_a_measurement_of_unseen_scans_warns_of_nothing(data: Path, tmp_path: Path) -> None:
    result = run(data, "evaluate", "mine", "--only", "two", "--only", "three", "-o", tmp_path)
    assert "learned from" not in result.output
    assert "learned from" not in (tmp_path / "report.html").read_text()


def test_a_calibration_by_scans_that_the_model_has_learned_from_is_refused(data: Path) -> None:
    before = (data / "mine" / "model.toml").read_bytes()
    result = run(data, "calibrate", "mine", "--only", "one", "--only", "two")
    assert result.exit_code != 0
    text = " ".join(result.output.replace("│", " ").split()) + str(result.exception)
    assert "has learned from one: leave them out" in text
    assert (data / "mine" / "model.toml").read_bytes() == before
    result = run(data, "calibrate", "mine", "--only", "three", "--only", "two")
    assert "learned from" not in result.output + str(result.exception)


def test_what_either_network_has_learned_from_counts(data: Path, tmp_path: Path) -> None:
    files = (data / "scans", data / "landmarks")
    words = SMALL
    landmarkd("train", *files, "-o", tmp_path / "two", *words, "--validate", "two,three")
    landmarkd("refine", tmp_path / "two", *files, "--spacing", 1, *words, "--validate", "one,two")
    assert learned_from(tmp_path / "two", choose_pairs(*files)) == ["one", "three"]


def test_a_model_with_folds_knows_its_scans_by_any_name(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    for inner, ending in (("scans", "nii.gz"), ("landmarks", "csv")):
        (tmp_path / inner / f"one.{ending}").rename(tmp_path / inner / f"another.{ending}")
    write_specimen(tmp_path, "strange", 9)
    assert seen(tmp_path, "crossed") == ["another", "three", "two"]
    assert seen(tmp_path, "mine") == []
    (tmp_path / "scans" / "another.nii.gz").write_bytes(b"no scan at all")
    assert seen(tmp_path, "crossed") == ["three", "two"]


def test_a_model_without_a_record_says_nothing(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    (tmp_path / "mine" / RECORD).unlink()
    assert seen(tmp_path, "mine") == []
    assert warning_of([]) == ""
