"""Model folders are imported, packed and installed by the command."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli.main import app
from app.errors import BadParameter, ModelRefused, UnknownModel
from app.model import hash_file, read_manifest
from tests.support.model_folders import make_model_folder
from tests.support.monai_bundles import RADIUS_MM, write_bundle
from tests.support.monai_bundles import build as build_monai
from tests.support.nnunet_results import build, write_results
from tests.support.services import toy_scan


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    (tmp_path / "scan.nii").write_bytes(toy_scan())
    return tmp_path / "scan.nii"


def test_packed_model_is_installed_beside_another_version(
    tmp_path: Path, scan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = tmp_path / "models"
    models.mkdir()
    folder = make_model_folder(models)
    packed = run("pack", folder)
    file = tmp_path / "toy-1.0.0.zip"
    assert packed.exit_code == 0, packed.output
    assert hash_file(file) in packed.output.replace("\n", "")
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(text.replace('"1.0.0"', '"0.9.0"'))
    for words in ("is installed", "is there already"):
        result = run("install", file, "--models-dir", models)
        assert result.exit_code == 0, result.output
        assert words in result.output
    for wanted, version in (("toy", "1.0.0"), ("toy@0.9.0", "0.9.0"), (None, "1.0.0")):
        chosen = [] if wanted is None else ["-m", wanted]
        result = run("detect", scan, *chosen, "--models-dir", models)
        assert json.loads(result.stdout)["model"]["version"] == version
    for wanted in ("toy@2", "else"):
        result = run("detect", scan, "-m", wanted, "--models-dir", models)
        assert isinstance(result.exception, UnknownModel)
    make_model_folder(models, "other")
    assert isinstance(run("detect", scan, "--models-dir", models).exception, BadParameter)


def test_imported_model_lies_beside_another_version(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", build_monai())
    models, given = tmp_path / "models", ("--set", RADIUS_MM, "--set", "version=2.0")
    for folder in ("blobs", "blobs@2.0"):
        result = run("import", "monai", bundle, "-o", models / folder, *given)
        assert result.exit_code == 0, result.exception
        assert read_manifest(models / folder).name == "blobs"
    refused = run("import", "monai", bundle, "-o", models / "blobs@3.0", *given)
    assert "blobs@3.0: name: expected the folder's name, got 'blobs@2.0'" in str(refused.exception)


def test_file_is_refused_in_place_of_the_folder_of_a_bundle(tmp_path: Path) -> None:
    file = tmp_path / "bundle.zip"
    file.write_bytes(b"PK")
    result = run("import", "monai", file, "-o", tmp_path / "blobs", "--set", RADIUS_MM)
    assert result.exit_code == 2
    assert "is a file" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "blobs").exists()


@pytest.mark.parametrize("path", ["trained/toy", "./toy"])
def test_model_is_named_by_the_path_of_its_folder(
    tmp_path: Path, scan: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "trained").mkdir()
    make_model_folder(tmp_path / "trained")
    monkeypatch.chdir(tmp_path if path.startswith("trained") else tmp_path / "trained")
    result = run("detect", scan.resolve(), "-m", path, "--models-dir", tmp_path / "none")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"]["name"] == "toy"
    wrong = run("detect", scan.resolve(), "-m", f"{path}-2")
    assert isinstance(wrong.exception, ModelRefused)


@pytest.mark.parametrize("words", [("check",), ("check", "--write"), ("pack",)])
@pytest.mark.parametrize("folder", [".", "./", "second/.."])
def test_model_in_the_current_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], folder: str
) -> None:
    monkeypatch.chdir(make_model_folder(tmp_path))
    Path("second").mkdir()
    result = run(*words, folder)
    assert result.exit_code == 0, result.exception


def test_scan_is_answered_by_the_model_in_the_current_folder(
    tmp_path: Path, scan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_model_folder(tmp_path))
    result = run("detect", scan, "-m", "./", "--device", "cpu")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["model"]["name"] == "toy"


def test_folder_that_does_not_serve_is_not_packed(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "weights.safetensors").write_bytes(b"")
    result = run("pack", folder, "-o", tmp_path / "toy.zip")
    assert isinstance(result.exception, ModelRefused)
    assert not (tmp_path / "toy.zip").exists()


def test_training_of_nnunet_is_imported(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    write_results(results, [build(), build()])
    folder = tmp_path / "blobs"
    result = run("import", "nnunet", results, "-o", folder, "--orientation", "RAS", "--fold", 1)
    assert result.exit_code == 0, result.output
    assert (folder / "fold_1.safetensors").exists()
    assert not (folder / "fold_0.safetensors").exists()
    assert run("check", folder).exit_code == 0


def test_bundle_of_monai_is_imported(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", build_monai())
    folder = tmp_path / "blobs"
    result = run("import", "monai", bundle, "-o", folder)
    assert isinstance(result.exception, BadParameter)
    assert "--set 'voting.radius_mm=" in str(result.exception)
    names = ("--landmark", "left", "--landmark", "right")
    result = run("import", "monai", bundle, "-o", folder, "--set", RADIUS_MM, *names)
    assert result.exit_code == 0, result.output
    assert run("check", folder).exit_code == 0
    assert [one.name for one in read_manifest(folder).landmarks] == ["left", "right"]
