"""A model folder becomes one file, and that file a folder beside others."""

import hashlib
import io
import os
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import pytest
import torch

from app.errors import BadParameter, ModelRefused, StartupError
from app.exchange import install_model, pack_model
from app.inference import load_checked
from tests.support.documents import ROOT
from tests.support.full_disk import limited_files
from tests.support.model_folders import make_model_folder
from tests.support.training_data import landmarkd

check = partial(load_checked, device=torch.device("cpu"))
TOP = "toy@1.0.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = {"mean": "shape.safetensors", "tolerance_mm": 1.0}
    folder = make_model_folder(tmp_path, shape=shape)
    (folder / "README.md").write_text("# A toy\n")
    (folder / "LICENSE").write_text("Do as you like.\n")
    (folder / "checkpoint.pt").write_bytes(b"of a training")
    return folder


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    return pack_model(folder, tmp_path / "toy.zip")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def rewrite(packed: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Change the files of an archive."""
    with ZipFile(packed) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(ZipInfo(name), content)
    return packed


def test_a_disk_that_takes_no_model_is_told_of_by_its_folder(packed: Path, models: Path) -> None:
    """No file was named, so that it might have been any disk."""
    with limited_files(100), pytest.raises(OSError, match="File too large") as caught:
        install_model(packed, models, check)
    assert caught.value.filename == str(models / TOP)
    assert list(models.iterdir()) == []


def test_installed_model_is_the_packed_one(packed: Path, models: Path, folder: Path) -> None:
    target, new = install_model(packed, models, check)
    assert (target, new) == (models / TOP, True)
    assert check(target).digest == check(folder).digest
    names = {path.name for path in target.iterdir()}
    assert names == {
        "LICENSE", "README.md", "SHA256SUMS", "model.toml", "selfcheck.safetensors",
        "shape.safetensors", "weights.safetensors",
    }  # fmt: skip
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=target, check=True)
    assert [path.name for path in models.iterdir()] == [TOP]


def test_same_folder_makes_the_same_bytes(packed: Path, folder: Path, tmp_path: Path) -> None:
    os.utime(folder / "model.toml", (1, 1))
    assert pack_model(folder, tmp_path / "again.zip").read_bytes() == packed.read_bytes()


def test_archive_unpacks_to_a_model_without_landmarkd(packed: Path, models: Path) -> None:
    with ZipFile(packed) as archive:
        archive.extractall(models)
    check(models / TOP)


def test_second_network_goes_along(models: Path, tmp_path: Path) -> None:
    file = pack_model(ROOT / "models" / "mouse-skull", tmp_path / "skull.zip")
    target, _ = install_model(file, models, lambda _: None)
    assert (target / "refine" / "model.toml").is_file()
    assert not (target / "checkpoint.pt").exists()


def test_tables_that_the_card_names_go_along_only_when_asked(
    folder: Path, models: Path, tmp_path: Path
) -> None:
    """The card of whoever installed it named a table that was nowhere, and nobody was told."""
    (folder / "README.md").write_text("See `tables/errors.csv`, [all](all.csv) and `none.csv`.\n")
    (folder / "tables").mkdir()
    for name in ("tables/errors.csv", "all.csv", "history.csv"):
        (folder / name).write_text("scan\n")
    said = landmarkd("pack", folder, "-o", tmp_path / "without.zip")
    assert "names all.csv, tables/errors.csv, left out as it may name scans of patients" in said
    assert "left out" not in landmarkd("pack", folder, "-o", tmp_path / "with.zip", "--tables")
    with ZipFile(tmp_path / "without.zip") as archive:
        assert not [name for name in archive.namelist() if name.endswith(".csv")]
    target, _ = install_model(tmp_path / "with.zip", models, check)
    assert {path.name for path in target.rglob("*.csv")} == {"all.csv", "errors.csv"}
    (folder / "README.md").write_text("See `folds/refine/errors.csv`.\n")
    (folder / "folds" / "refine").mkdir(parents=True)
    (folder / "folds" / "refine" / "errors.csv").touch()
    with pytest.raises(BadParameter, match=r"--tables: expected .*, got folds/refine/errors\.csv"):
        pack_model(folder, tmp_path / "deep.zip", tables=True)


def test_nothing_that_is_there_is_overwritten(packed: Path, models: Path, folder: Path) -> None:
    install_model(packed, models, check)
    assert install_model(packed, models, check) == (models / TOP, False)
    (folder / "README.md").write_text("# Another toy\n")
    other = pack_model(folder, packed.with_name("other.zip"))
    with pytest.raises(ModelRefused, match=r"toy@1\.0\.0 is there already, with other content"):
        install_model(other, models, check)
    assert (models / TOP / "README.md").read_text() == "# A toy\n"
    with pytest.raises(BadParameter, match="not there yet"):
        pack_model(folder, other)


def test_archive_without_hashes_is_not_said_to_be_installed(packed: Path, models: Path) -> None:
    """Any folder of that name held all of no files."""
    install_model(packed, models, check)
    with pytest.raises(ModelRefused, match="SHA256SUMS that differs from its files in"):
        install_model(rewrite(packed, promise_nothing), models, check)


def test_model_that_does_not_serve_is_not_installed(packed: Path, models: Path) -> None:
    def fail(folder: Path) -> None:
        raise ModelRefused(folder.name)

    with pytest.raises(ModelRefused, match=TOP):
        install_model(packed, models, fail)
    assert list(models.iterdir()) == []


def damage(files: dict[str, bytes]) -> None:
    files[f"{TOP}/README.md"] += b"!"


def leave_out(files: dict[str, bytes]) -> None:
    del files[f"{TOP}/weights.safetensors"]


def leave_out_hashes(files: dict[str, bytes]) -> None:
    del files[f"{TOP}/SHA256SUMS"]


def add_without_a_hash(files: dict[str, bytes]) -> None:
    files[f"{TOP}/run.sh"] = b"rm -rf /"


def promise_nothing(files: dict[str, bytes]) -> None:
    files[f"{TOP}/SHA256SUMS"] = b""


def escape(files: dict[str, bytes]) -> None:
    files["../evil"] = b"evil"


def escape_deeper(files: dict[str, bytes]) -> None:
    files[f"{TOP}/../../evil"] = b"evil"


def write_elsewhere(files: dict[str, bytes]) -> None:
    files["/evil"] = b"evil"


def bring_another(files: dict[str, bytes]) -> None:
    files["other@1.0.0/model.toml"] = b"evil"


def hash_elsewhere(files: dict[str, bytes]) -> None:
    digest = hashlib.sha256(b"evil").hexdigest().encode()
    files[f"{TOP}/../evil"] = b"evil"
    files[f"{TOP}/SHA256SUMS"] += digest + b"  ../evil\n"


def make_a_folder_of_a_file(files: dict[str, bytes]) -> None:
    """The system's words for it were all that was said."""
    files[f"{TOP}/README.md/x"] = b""
    files[f"{TOP}/SHA256SUMS"] += f"{hashlib.sha256().hexdigest()}  README.md/x\n".encode()


def add_many(files: dict[str, bytes]) -> None:
    files |= {f"{TOP}/file{number}": b"" for number in range(70)}


@pytest.mark.parametrize(
    "change",
    [
        damage, leave_out, leave_out_hashes, add_without_a_hash, promise_nothing, escape,
        escape_deeper, write_elsewhere, bring_another, hash_elsewhere,
        make_a_folder_of_a_file, add_many,
    ],
)  # fmt: skip
def test_archive_of_anything_else_leaves_nothing(
    packed: Path, models: Path, change: Callable[[dict[str, bytes]], None]
) -> None:
    with pytest.raises(ModelRefused, match=r"toy\.zip: expected a file that landmarkd pack wrote"):
        install_model(rewrite(packed, change), models, check)
    assert list(models.iterdir()) == []
    assert not (models.parent / "evil").exists()


def test_compressed_archive_is_refused_before_it_is_read(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "bomb.zip"
    with ZipFile(file, "w", ZIP_DEFLATED) as archive:
        archive.writestr(f"{TOP}/SHA256SUMS", b"")
        archive.writestr(f"{TOP}/model.toml", bytes(50_000_000))
    with pytest.raises(ModelRefused, match="got compressed files"):
        install_model(file, models, check)


def test_hashes_as_large_as_an_archive_are_not_read_into_memory(packed: Path, models: Path) -> None:
    def fill(files: dict[str, bytes]) -> None:
        files[f"{TOP}/SHA256SUMS"] += 10_000_000 * b"\n"

    rewrite(packed, fill)
    tracemalloc.start()
    try:
        with pytest.raises(ModelRefused, match=r"SHA256SUMS of 10\d{6} bytes"):
            install_model(packed, models, check)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_archive_that_says_to_be_larger_than_it_is_is_refused(packed: Path, models: Path) -> None:
    data = bytearray(packed.read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # The last file's, in the directory at the end.
    data[entry + 20 : entry + 28] = (1 << 31).to_bytes(4, "little") * 2
    packed.write_bytes(data)
    with pytest.raises(ModelRefused, match="larger than all of it"):
        install_model(packed, models, check)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_file_that_is_no_archive_is_refused(models: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "toy.zip"
    file.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"toy\.zip: expected a file that landmarkd pack wrote"):
        install_model(file, models, check)


def test_every_cut_of_an_archive_is_refused(packed: Path, models: Path) -> None:
    data = packed.read_bytes()
    for end in range(0, len(data), len(data) // 23):
        packed.write_bytes(data[:end])
        with pytest.raises(ModelRefused):
            install_model(packed, models, check)
    assert list(models.iterdir()) == []


@pytest.mark.parametrize("shift", [1, 77, 1 << 20])
def test_archive_whose_files_begin_before_it_is_refused(
    packed: Path, models: Path, shift: int
) -> None:
    """Its end says where its directory begins, and a damaged one is taken for so much in front."""
    content = bytearray(packed.read_bytes())
    begin = int.from_bytes(content[-6:-2], "little")
    content[-6:-2] = (begin + shift).to_bytes(4, "little")
    packed.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"toy\.zip: expected a file that landmarkd pack wrote"):
        install_model(packed, models, check)
    assert not list(models.iterdir())


def test_version_that_is_no_name_is_refused(folder: Path, tmp_path: Path) -> None:
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(text.replace('"1.0.0"', '"../1"'))
    with pytest.raises(ModelRefused, match="as it becomes part of a name"):
        pack_model(folder, tmp_path / "toy.zip")


def test_folder_of_models_must_be_there(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        install_model(packed, tmp_path / "nowhere", check)


def test_nothing_of_an_archive_is_compressed_or_dated(packed: Path) -> None:
    with ZipFile(io.BytesIO(packed.read_bytes())) as archive:
        for entry in archive.infolist():
            assert entry.compress_type == zipfile.ZIP_STORED
            assert entry.date_time == (1980, 1, 1, 0, 0, 0)
