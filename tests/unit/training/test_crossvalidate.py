"""Trainings of folds: what they are trained on, how they resume, and what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from app.cli.main import app
from app.errors import BadParameter, StartupError
from app.inference.load import load_checked
from app.model import editing, update_hashes
from app.training.cli.train import INTERRUPTED
from app.training.data.folds import read_folds
from app.training.data.specimens import Specimen, SpecimenFiles, load_specimen
from app.training.files import CHECKPOINT, OUTCOMES, RECORD, REFINE
from app.training.fit import loop
from app.training.fit.history import read_history
from app.training.record import check_alike
from tests.support.training_data import (
    BLOBS,
    SMALL,
    TILES,
    interrupt_after,
    landmarkd,
    read_csv,
    write_specimen,
    write_specimens,
)

FOLDS = (*TILES, "--folds", 3)
FINER = (*SMALL, "--spacing", 1.0, "--folds", 3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_specimens(tmp_path, "one", "two", "three")


@pytest.fixture(scope="module")
def folds_of_three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[set[str]]]:
    """The data, and a model of them with its folds; and the scans that each was trained on."""
    data = write_specimens(tmp_path_factory.mktemp("three"), "one", "two", "three")
    with pytest.MonkeyPatch.context() as patch:
        names = record_trainings(patch)
        train(data, "--steps", 2)
    return data, trainings(names)


@pytest.fixture
def trained(folds_of_three: tuple[Path, list[set[str]]], tmp_path: Path) -> Path:
    """The data, and the model of them with its folds; a copy for each test."""
    return shutil.copytree(folds_of_three[0], tmp_path / "trained")


def train(data: Path, *words: object) -> str:
    return landmarkd(
        "train", data / "scans", data / "landmarks", "-o", data / "mine", *FOLDS, *words
    )


def refine(data: Path, *words: object) -> str:
    return landmarkd("refine", data / "mine", data / "scans", data / "landmarks", *FINER, *words)


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_trainings(monkeypatch)


def record_trainings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the scans that each training reads to train on, and an empty name as it starts."""
    names: list[str] = []

    def load(files: SpecimenFiles, *rest: Any) -> Specimen:
        names.append(files.name)
        return load_specimen(files, *rest)

    def start(*rest: Any) -> bool:
        names.append("")
        return loop.train(*rest)

    monkeypatch.setattr("app.training.pipeline.load_specimen", load)
    monkeypatch.setattr("app.training.pipeline.train", start)
    return names


def trainings(trained_on: list[str]) -> list[set[str]]:
    """Return the scans that each training was trained on."""
    return [set(part.split()) for part in " ".join(trained_on).split("  ") if part.strip()]


@pytest.mark.no_cover
def test_no_fold_nor_its_second_network_is_trained_on_its_own_scans(
    folds_of_three: tuple[Path, list[set[str]]], trained: Path, trained_on: list[str]
) -> None:
    data = trained
    folds = read_folds(data / "mine")
    assert folds is not None
    every_scan = {"one", "two", "three"}
    expected = [every_scan - set(fold) for fold in folds.members] + [every_scan]
    assert folds_of_three[1] == expected
    output = refine(data)
    assert trainings(trained_on) == expected
    assert "fold 3 of 3" in output
    for number in (1, 2, 3):
        model = load_checked(folds.folder(data / "mine", number), torch.device("cpu"))
        assert model.refine is not None
    assert load_checked(data / "mine", torch.device("cpu")).refine is not None
    card = (data / "mine" / "README.md").read_text()
    assert "of 3 models of one network" in card
    assert "of 3 pairs of networks" in card
    assert len(read_csv(data / "mine" / "folds" / "refine" / "errors.csv")) == 15
    trained_on.clear()
    assert "fold 3 of 3: is done" in refine(data)
    assert trainings(trained_on) == [every_scan]
    (data / "mine" / "refine").rename(data / "mine" / "finer")  # Names are free.
    with editing(data / "mine" / "finer") as document:
        document["name"] = "finer"
    with editing(data / "mine") as document:
        document["refine"]["folder"] = "finer"
        update_hashes(data / "mine", document)
    words = ("--scans", data / "scans", "--landmarks", data / "landmarks", "--folds")
    result = CliRunner().invoke(app, [str(word) for word in ("calibrate", data / "mine", *words)])
    assert "expected at least 19 errors" in str(result.exception)


@pytest.mark.no_cover
def test_a_fold_does_not_depend_on_the_voxels_and_points_of_its_own_scans(
    trained: Path, data: Path
) -> None:
    """To the last bit; the others do."""
    write_specimen(data, "three", 7)
    train(data, "--steps", 2)
    weights = []
    for model in (trained / "mine", data / "mine"):
        folds = read_folds(model)
        assert folds is not None
        weights.append(
            {
                fold: load_file(folds.folder(model, number) / "weights.safetensors")
                for number, (fold,) in enumerate(folds.members, start=1)
            }
        )
    for fold, before in weights[0].items():
        same = all(torch.equal(before[key], weights[1][fold][key]) for key in before)
        assert same == (fold == "three")


@pytest.mark.no_cover
def test_an_interrupted_cross_validation_resumes_in_its_fold(
    trained: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done is not done again, and the outcome is that of one that was not interrupted."""
    words = ("train", data / "scans", data / "landmarks", *FOLDS, "--steps", 2, "-o", data / "mine")
    command = [str(word) for word in words]
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        result = CliRunner().invoke(app, command)
    assert result.exit_code == INTERRUPTED
    folds = read_folds(data / "mine")
    assert folds is not None
    first, second, third = (folds.folder(data / "mine", number) for number in (1, 2, 3))
    assert (first / OUTCOMES).exists()
    assert (second / CHECKPOINT).exists()
    assert not (second / OUTCOMES).exists()
    assert not third.exists()
    assert not (data / "mine" / CHECKPOINT).exists()
    changed = (first / "weights.safetensors").stat().st_mtime_ns
    output = landmarkd(*command)
    assert "fold 1 of 3: is done" in output
    assert "resuming at step 1 of 2" in output
    assert (first / "weights.safetensors").stat().st_mtime_ns == changed
    for inner in ("", "folds/fold-1", "folds/fold-2", "folds/fold-3"):
        plain, mine = (
            load_file(one / "mine" / inner / "weights.safetensors") for one in (trained, data)
        )
        assert all(torch.equal(plain[key], mine[key]) for key in plain)
    for name in ("errors.csv", "summary.csv"):
        texts = [(one / "mine" / "folds" / name).read_text() for one in (trained, data)]
        assert texts[0] == texts[1]


def test_an_interrupt_in_the_last_step_of_a_fold_keeps_the_next_one_from_beginning(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one that came too late, and hours of other trainings followed."""
    words = ("train", data / "scans", data / "landmarks", *FOLDS, "-o", data / "mine")
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == INTERRUPTED
    first, second = (data / "mine" / "folds" / f"fold-{number}" for number in (1, 2))
    assert not second.exists()
    (row,) = read_history(first, 1)
    assert row.not_found == len(BLOBS)
    said = landmarkd(*words)
    assert "fold 1 of 3: is done" in said
    assert "fold 3 of 3: without" in said


def test_folds_of_another_training_are_refused_before_anything_is_trained(trained: Path) -> None:
    data = trained
    with pytest.raises(StartupError, match="steps: expected 2, got 1"):
        train(data)
    for path in (data / "mine" / CHECKPOINT, *(data / "mine").glob("*.safetensors")):
        path.unlink()
    with pytest.raises(StartupError, match=r"fold-1 holds .* or delete \S*/mine/folds$"):
        train(data)
    path = data / "mine" / "folds" / "fold-1" / RECORD
    path.write_text(path.read_text().replace('"stride": 2', '"stride": 1'))
    with pytest.raises(StartupError, match="stride: expected 1, got 2"):
        train(data, "--steps", 2)
    with pytest.raises(StartupError, match=r"than were asked for \(2 of seed 1\)"):
        train(data, "--folds", 2)
    with pytest.raises(BadParameter, match="--folds: expected 3, as the first network has, got 2"):
        refine(data, "--folds", 2)
    folds = read_folds(data / "mine")
    assert folds is not None
    (folds.folder(data / "mine", 2) / OUTCOMES).unlink()
    with pytest.raises(BadParameter, match="expected all folds of the first network to be done"):
        refine(data)


def test_folds_that_were_trained_otherwise_do_not_calibrate_a_model(trained: Path) -> None:
    """But for the seed, and for shapes that follow from the scans."""
    path = trained / "mine" / "folds" / "fold-2" / RECORD
    record = json.loads(path.read_text())
    record["recipe"] |= {"seed": 7, "tile_shape": [16, 16, 32]}
    path.write_text(json.dumps(record))
    check_alike(trained / "mine", path.parent)
    record["recipe"]["steps"] = 3
    record["recipe"]["augmentation"]["scale"] = 0.2
    record["mirror"] = True
    path.write_text(json.dumps(record))
    message = (
        r"--folds: .* as \S*/mine was, got \S*fold-2 \(steps: expected 2, got 3; "
        r"augmentation.scale: expected 0.1, got 0.2; mirror: expected False, got True\): train"
    )
    where = ("--scans", trained / "scans", "--landmarks", trained / "landmarks")
    with pytest.raises(BadParameter, match=message):
        landmarkd("calibrate", trained / "mine", *where, "--folds")


@pytest.mark.no_cover
def test_train_only_scans_are_trained_on_in_every_fold(data: Path, trained_on: list[str]) -> None:
    """But for those of a subject that the fold leaves out."""
    words = ("--subject", "^(o|t)", "--train-only", "two", "--folds", 2)
    output = re.sub(r"[│\s]+", " ", train(data, *words))
    assert "1 more is only trained on" in output
    folds = read_folds(data / "mine")
    assert folds is not None
    left = {"one": {"two", "three"}, "three": {"one"}}
    every_scan = {"one", "two", "three"}
    expected = [left[fold] for (fold,) in folds.members] + [every_scan]
    assert trainings(trained_on) == expected
    assert {row["scan"] for row in read_csv(data / "mine" / "folds" / "errors.csv")} == {
        "one",
        "three",
    }
    card = " ".join((data / "mine" / "README.md").read_text().split())
    assert "1/2 of the 2 scans and on 1 more that are never held out" in card
    trained_on.clear()
    refine(data, "--folds", 2)
    assert trainings(trained_on) == expected
    second = data / "mine" / "folds" / "fold-2" / REFINE
    (second / OUTCOMES).unlink()
    with pytest.raises(StartupError, match=f"fold 2 in {second}, found none: delete its chec"):
        refine(data, "--folds", 2)
    (second / CHECKPOINT).unlink()
    refine(data, "--folds", 2)
    assert (second / OUTCOMES).exists()


def test_a_second_network_needs_the_folds_of_the_first(data: Path) -> None:
    words = (data / "scans", data / "landmarks", *SMALL, "--spacing", 1.5)
    landmarkd("train", *words, "-o", data / "mine", "--validate", "none")
    with pytest.raises(BadParameter, match="expected a first network with folds, found none"):
        refine(data)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--folds", 1), "expected 2 to 3, as there are 3 subjects, got 1"),
        (("--folds", 4), "expected 2 to 3, as there are 3 subjects, got 4"),
        (("--fold", 4), "--fold: expected one of 1 to 3, got 4"),
        (("--validate", "one"), "holds out every scan in turn: expected no --validate"),
        (("--subject", "x"), "--subject: expected x in the name of every scan, got one"),
        (("--train-only", "x"), "--train-only: expected names of scans, found none named x"),
        (("--train-only", "one"), "expected 2 to 2, as there are 2 subjects, got 3"),
    ],
)
def test_impossible_folds_are_refused(data: Path, words: tuple[object, ...], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        train(data, *words)
    assert not (data / "mine").exists()


def test_a_fold_of_nobody_knows_how_many_is_refused(data: Path) -> None:
    """What was said: expected one of 1 to 0."""
    words = (data / "scans", data / "landmarks", "-o", data / "mine", *TILES, "--fold", 1)
    with pytest.raises(BadParameter, match="--fold: expected --folds beside it"):
        landmarkd("train", *words)


def test_a_check_prints_the_folds_and_trains_none(data: Path) -> None:
    output = " ".join(train(data, "--check").split())
    assert "│ --folds │ 3 │ each held out once" in output
    assert not (data / "mine").exists()


@pytest.mark.no_cover
def test_folds_do_not_start_from_weights_that_were_trained_on_their_scans(trained: Path) -> None:
    """But each from the same fold of a model that has the same folds."""
    data = trained
    words = (data / "scans", data / "landmarks", *TILES)
    landmarkd("train", *words, "-o", data / "seen", "--validate", "none")
    with pytest.raises(BadParameter, match="was trained on one, three, two"):
        train(data, "-o", data / "unseen", "--start", data / "seen")
    start = ("--folds", 3, "--start", data / "mine", "--rate", 0)
    landmarkd("train", *words, "-o", data / "more", *start)
    for inner in ("", "folds/fold-1", "folds/fold-2", "folds/fold-3"):
        before, after = (
            load_file(data / name / inner / "weights.safetensors") for name in ("mine", "more")
        )
        assert all(torch.equal(before[key], after[key]) for key in before)
    (data / "mine" / "folds" / "fold-2" / OUTCOMES).unlink()
    with pytest.raises(BadParameter, match=r"expected folds that are done, \S*fold-2 are not"):
        landmarkd("train", *words, "-o", data / "third", *start)


def test_folds_can_be_done_one_by_one(data: Path) -> None:
    """Perhaps by several processes; the command without --fold puts them together."""
    for number in (2, 3):
        train(data, "--fold", number)
        assert not (data / "mine" / CHECKPOINT).exists()
    train(data, "--fold", 1)
    with pytest.raises(BadParameter, match="expected a first network of all scans, too"):
        refine(data, "--fold", 1)
    folder = ("-o", data / "mine", *TILES)
    landmarkd("train", data / "scans", data / "landmarks", *folder, "--validate", "none")
    output = train(data)
    for number in (1, 2, 3):
        assert f"fold {number} of 3: is done" in output
    assert re.search(r"all \d+ steps are done", output)
    assert len(read_csv(data / "mine" / "folds" / "errors.csv")) == 15
