"""The registry: good folders serve, bad ones say why, and a reload never leaves a gap."""

import os
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from app.errors import BadParameter, ModelRefused, NetworkFailed, StartupError, UnknownModel
from app.inference.load import load_checked
from app.model.loader import load_module
from app.model.manifest import Manifest
from app.model.registry import LoadedModel, Registry, scan_models
from app.model.selfcheck import write_selfcheck
from tests.support.model_folders import (
    make_model_folder,
    make_program_folder,
    manifest_table,
    shape_of,
)

CPU = torch.device("cpu")
load = partial(load_checked, device=CPU)
ARGUMENTS = manifest_table()["network"]["arguments"]
SHAPE = {"mean": "shape.safetensors", "tolerance_mm": 1.0}


def test_every_folder_with_a_manifest_is_a_model_but_hidden_ones(tmp_path: Path) -> None:
    for name in ("b", "a", "__pycache__", ".git"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.toml").touch()
    (tmp_path / "train.py").touch()
    assert [folder.name for folder in scan_models(tmp_path)] == ["a", "b"]


def test_a_training_that_has_written_no_manifest_yet_is_neither_model_nor_refusal(
    tmp_path: Path,
) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "checkpoint.pt").touch()
    manifest = (folder / "model.toml").rename(tmp_path / "model.toml")
    registry = Registry(tmp_path, load)
    registry.load_all()
    assert not registry.models
    assert not registry.refusals
    with pytest.raises(UnknownModel, match="expected a model folder, got 'toy'; found: none"):
        registry.reload("toy")
    manifest.rename(folder / "model.toml")
    assert registry.reload("toy").manifest.name == "toy"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    folder.chmod(0)
    registry = Registry(tmp_path, load)
    registry.load_all()
    folder.chmod(0o755)
    assert registry.refusals == {"toy": "toy: expected files to read, got Permission denied"}


def test_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="expected a folder of models, 'nowhere' is none"):
        scan_models(tmp_path / "nowhere")


def test_root_that_no_system_opens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="expected a folder of models"):
        scan_models(tmp_path / ("long" * 100))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_root_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir(mode=0)
    with pytest.raises(StartupError) as refusal:
        scan_models(root)
    assert str(refusal.value) == (
        "expected a folder of models to read, got 'models': Permission denied"
    )


def test_model_is_loaded_with_its_card_and_shape(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, shape=SHAPE)
    (folder / "README.md").write_text("# A toy\n")
    model = load(folder)
    assert model.card == "# A toy\n"
    assert model.shape is not None
    np.testing.assert_array_equal(model.shape.mean, shape_of(3))
    assert len(model.digest) == 64
    assert model.network.device == CPU


def test_model_needs_neither_card_nor_shape(tmp_path: Path) -> None:
    model = load(make_model_folder(tmp_path))
    assert model.card == ""
    assert model.shape is None


def test_digest_changes_with_the_manifest(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    before = load(folder).digest
    assert load(folder).digest == before
    text = (folder / "model.toml").read_text().replace("threshold = 0.3", "threshold = 0.4")
    (folder / "model.toml").write_text(text)
    assert load(folder).digest != before


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"mean": shape_of(4)}, r"shape.mean: expected floats of shape \[3, 3\], got .* \[4, 3\]"),
        ({"mean": np.zeros((3, 3), np.int64)}, r"expected floats .* got torch.int64"),
        ({"points": shape_of(3)}, r"shape.mean: expected a tensor 'mean', got \['points'\]"),
        ({"mean": np.full((3, 3), np.inf)}, "shape.mean: expected finite positions"),
        ({"mean": np.full((3, 3), np.nan)}, "shape.surroundings: expected landmarks that have"),
    ],
)
def test_wrong_shape_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    place = {"beyond": "1", "seen_from": "2", "mm": 20.0}
    folder = make_model_folder(tmp_path, shape=SHAPE | {"surroundings": [place]})
    save_file(tensors, folder / "shape.safetensors")
    write_selfcheck(folder)
    with pytest.raises(ModelRefused, match=message):
        load(folder)


def test_shape_with_another_hash_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, shape=SHAPE)
    save_file({"mean": shape_of(3) + 1}, folder / "shape.safetensors")
    with pytest.raises(ModelRefused, match=r"shape.sha256: expected \w+, shape.safetensors has"):
        load(folder)


def test_card_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelRefused, match=r"toy: README.md: expected UTF-8"):
        load(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("weights.safetensors", "Permission denied"),
        ("selfcheck.safetensors", "some that this user may not read"),
    ],
)
def test_unreadable_file_is_refused_without_its_path(tmp_path: Path, name: str, got: str) -> None:
    folder = make_model_folder(tmp_path)
    (folder / name).chmod(0)
    with pytest.raises(ModelRefused) as refusal:
        load(folder)
    assert str(refusal.value) == f"toy: expected files to read, got {got}"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path, load)


def test_refused_folder_stops_no_other(tmp_path: Path, registry: Registry) -> None:
    make_model_folder(tmp_path, "good")
    bad = make_model_folder(tmp_path, "bad")
    (bad / "weights.safetensors").write_bytes(b"other")
    registry.load_all()
    assert list(registry.models) == ["good"]
    assert registry.refusals["bad"].startswith("bad: network.sha256: expected ")


SHORTAGE = "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(SHORTAGE), "expected to fit on cpu, ran out of memory"),
        (MemoryError(), "expected to fit on cpu, ran out of memory"),
        (RuntimeError("odd\nstack"), "expected to load, got RuntimeError: odd"),
        (NetworkFailed("odd"), "expected to load, got NetworkFailed: odd"),
    ],
)
def test_a_folder_that_fails_in_an_unforeseen_way_is_refused_and_stops_no_other(
    tmp_path: Path,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
) -> None:
    for name in ("bad", "good"):
        make_model_folder(tmp_path, name)

    def fail(folder: Path, manifest: Manifest, **options: bool) -> torch.nn.Module:
        if folder.name == "bad":
            raise error
        return load_module(folder, manifest, **options)

    monkeypatch.setattr("app.model.registry.load_module", fail)
    registry.load_all()
    assert list(registry.models) == ["good"]
    assert registry.refusals == {"bad": f"bad: {reason}"}


def test_an_architecture_whose_module_cannot_be_imported_is_refused(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a package that it needs were installed in another version."""
    make_model_folder(tmp_path)

    def fail(name: str) -> None:
        raise ImportError(f"cannot import name 'x' from {name!r}")

    monkeypatch.setattr("app.model.modules.architectures.importlib.import_module", fail)
    registry.load_all()
    assert "network.architecture: expected an installed module" in registry.refusals["toy"]


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "shape.safetensors", "network.onnx", "refine/model.toml"]
)
def test_what_is_loaded_are_the_bytes_that_were_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nobody can exchange a file between its check and its use."""
    if name.endswith(".onnx"):
        folder = make_program_folder(tmp_path)
    else:
        folder = make_model_folder(tmp_path, shape=SHAPE)
    if name.startswith("refine"):
        make_model_folder(folder, "refine", shape=SHAPE)
        write_selfcheck(folder / "refine")
        text = (folder / "model.toml").read_text()
        (folder / "model.toml").write_text(f'{text}\n[refine]\nfolder = "refine"\n')
        write_selfcheck(folder)
    target, opened = (folder / name).resolve(), Path.open

    def open_once(path: Path, *arguments: Any, **options: Any) -> IO[Any]:
        file: IO[Any] = opened(path, *arguments, **options)
        if path == target:
            path.unlink()
        return file

    monkeypatch.setattr(Path, "open", open_once)
    load(folder)
    assert not target.exists()


def test_only_model_is_the_default(tmp_path: Path, registry: Registry) -> None:
    make_model_folder(tmp_path, "one")
    registry.load_all()
    assert registry.get().manifest.name == "one"
    assert registry.get("one") is registry.get()


def test_several_models_need_a_name_or_a_default(tmp_path: Path, registry: Registry) -> None:
    make_model_folder(tmp_path, "one")
    make_model_folder(tmp_path, "two")
    registry.load_all()
    told = r"expected one of one, two; got none \(in a query model=, in a command -m\)"
    with pytest.raises(BadParameter, match=told):
        registry.get()
    for wanted, known in (("three", "one, two"), ("one@2", r"one@1\.0\.0, two@1\.0\.0")):
        with pytest.raises(UnknownModel, match=f"expected one of {known}; got '{wanted}'"):
            registry.get(wanted)
    default = Registry(tmp_path, load, default="two")
    default.load_all()
    assert default.get().manifest.name == "two"


def test_names_are_all_that_are_known(tmp_path: Path, registry: Registry) -> None:
    assert registry.names == frozenset()
    make_model_folder(tmp_path, "one")
    (make_model_folder(tmp_path, "two") / "model.toml").write_text("none")
    registry.load_all()
    assert registry.names == {"one", "one@1.0.0"}
    assert all(registry.get(name) is registry.get("one") for name in registry.names)


def test_empty_registry_says_that_none_is_loaded(registry: Registry) -> None:
    registry.load_all()
    with pytest.raises(UnknownModel, match="got a service that has none"):
        registry.get()


def test_reload_swaps_in_the_new_model(tmp_path: Path, registry: Registry) -> None:
    folder = make_model_folder(tmp_path)
    registry.load_all()
    old = registry.get("toy")
    text = (folder / "model.toml").read_text().replace('"1.0.0"', '"1.1.0"')
    (folder / "model.toml").write_text(text)
    assert registry.reload("toy") is registry.get("toy")
    assert registry.get("toy").manifest.version == "1.1.0"
    assert old.manifest.version == "1.0.0"


def test_refused_reload_leaves_the_old_model_serving(tmp_path: Path, registry: Registry) -> None:
    folder = make_model_folder(tmp_path)
    registry.load_all()
    old = registry.get("toy")
    good = (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(b"other")
    with pytest.raises(ModelRefused, match=r"network.sha256"):
        registry.reload("toy")
    assert registry.get("toy") is old
    assert "network.sha256" in registry.refusals["toy"]
    (folder / "weights.safetensors").write_bytes(good)
    registry.reload("toy")
    assert not registry.refusals


def test_refused_folder_that_is_gone_is_no_longer_listed_once_its_reload_is_asked_for(
    tmp_path: Path, registry: Registry
) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "weights.safetensors").unlink()
    registry.load_all()
    assert list(registry.refusals) == ["toy"]
    shutil.rmtree(folder)
    with pytest.raises(UnknownModel):
        registry.reload("toy")
    assert not registry.refusals


def test_reload_finds_new_folders_and_none_outside(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    make_model_folder(tmp_path, "outside")
    registry = Registry(root, load)
    registry.load_all()
    for name in ("outside", "../outside", "."):
        with pytest.raises(UnknownModel, match="expected a model folder"):
            registry.reload(name)
    make_model_folder(root, "new")
    assert registry.reload("new") is registry.get("new")


def test_model_is_built_before_it_is_swapped(tmp_path: Path) -> None:
    make_model_folder(tmp_path)
    building, go_on = threading.Event(), threading.Event()
    go_on.set()

    def slowly(folder: Path) -> LoadedModel:
        building.set()
        assert go_on.wait(60)
        return load(folder)

    registry = Registry(tmp_path, slowly)
    registry.load_all()
    old = registry.get()
    building.clear()
    go_on.clear()
    thread = threading.Thread(target=registry.reload, args=("toy",))
    thread.start()
    assert building.wait(60)
    assert registry.get() is old
    go_on.set()
    thread.join()
    assert registry.get() is not old
