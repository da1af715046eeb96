"""Versions of a model folder: exchanged at once, and back, whenever a process is killed."""

import ctypes
from functools import partial
from pathlib import Path

import pytest

from app.errors import BadParameter, StartupError
from app.model import read_manifest, scan_models
from app.training.files import CHECKPOINT
from app.training.versions import exclusive, next_version, prepare_next, put_back, put_in_place
from tests.support.killing import killed_at
from tests.support.model_folders import make_model_folder

KILLED = 200
"""More than a process makes steps here."""


def version_of(folder: Path) -> str:
    return read_manifest(folder).version


@pytest.mark.parametrize(
    ("version", "expected"), [("2.2.9", "2.2.10"), ("1", "2"), ("1.0-rc", "1.1-rc"), ("a", "a.1")]
)
def test_last_number_of_a_version_counts(version: str, expected: str) -> None:
    assert next_version(version) == expected


def test_next_version_is_a_copy_without_the_training_of_this_one(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / CHECKPOINT).touch()
    for name in ("folds", "crossvalidation"):
        (folder / name).mkdir()
        (folder / name / "errors.csv").touch()
    candidate = prepare_next(folder)
    assert version_of(candidate) == "1.0.1"
    assert version_of(folder) == "1.0.0"
    names = {path.name for path in folder.iterdir()}
    names -= {CHECKPOINT, "folds", "crossvalidation"}
    assert {path.name for path in candidate.iterdir()} == names
    assert scan_models(tmp_path) == [folder]


def test_version_before_comes_back_once(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    with pytest.raises(BadParameter, match=r"before 1\.0\.0 of toy, found none"):
        put_back(folder)
    put_in_place(prepare_next(folder), folder)
    put_in_place(prepare_next(folder), folder)
    assert version_of(folder) == "1.0.2"
    assert put_back(folder) == ("1.0.2", "1.0.1")
    assert version_of(folder) == "1.0.1"
    with pytest.raises(BadParameter, match="found none"):
        put_back(folder)


def test_no_two_versions_have_the_same_number(tmp_path: Path) -> None:
    """Kept cases know versions by number: answers of one were taken for answers of another."""
    folder = make_model_folder(tmp_path)
    put_in_place(prepare_next(folder), folder)
    assert put_back(folder) == ("1.0.1", "1.0.0")
    assert version_of(prepare_next(folder)) == "1.0.2"
    put_in_place(prepare_next(folder), folder)  # As 1.0.2 was no better.
    assert put_back(folder) == ("1.0.3", "1.0.0")
    with pytest.raises(BadParameter, match="found none"):
        put_back(folder)
    assert version_of(prepare_next(folder)) == "1.0.4"


@pytest.mark.parametrize("target", ["toy", "toy-v3"])
def test_link_to_a_model_leads_to_the_version_in_place(tmp_path: Path, target: str) -> None:
    """Its target may be on another disk, where no exchange with the link itself is possible.

    Where it had another name than the link, the next version was refused for that name.
    """
    (tmp_path / "models").mkdir()
    (tmp_path / "disk").mkdir()
    made = make_model_folder(tmp_path / "disk")
    folder = made.rename(made.with_name(target))
    link = tmp_path / "models" / made.name
    link.symlink_to(folder)
    candidate = prepare_next(link)
    assert version_of(candidate) == "1.0.1"
    put_in_place(candidate, link)
    assert link.is_symlink()
    assert (version_of(link), link.resolve()) == ("1.0.1", folder)
    assert put_back(link) == ("1.0.1", "1.0.0")
    assert (version_of(link), link.resolve()) == ("1.0.0", folder)


def test_process_killed_at_any_step_leaves_a_whole_model_in_place(tmp_path: Path) -> None:
    states = set()
    for step in range(KILLED):
        (tmp_path / str(step)).mkdir()
        folder = make_model_folder(tmp_path / str(step))
        put_in_place(prepare_next(folder), folder)
        candidate = prepare_next(folder)
        whole = {path.name for path in folder.iterdir()}
        killed = killed_at(step, partial(put_in_place, candidate, folder))
        assert {path.name for path in folder.iterdir()} == whole
        version = version_of(folder)
        states.add(version)
        if version == "1.0.2":
            assert put_back(folder) == ("1.0.2", "1.0.1")
        if not killed:
            break
    assert not killed
    assert states == {"1.0.1", "1.0.2"}


def test_versions_are_changed_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    put_in_place(prepare_next(folder), folder)
    with exclusive(folder), pytest.raises(StartupError, match="one landmarkd learn at a time"):
        put_back(folder)
    assert version_of(folder) == "1.0.1"
    put_back(folder)
    assert version_of(folder) == "1.0.0"


def test_folder_named_after_one_version_is_refused_at_once(tmp_path: Path) -> None:
    """After all data were read: expected the folder's name, got 'toy@1.0.1'."""
    folder = make_model_folder(tmp_path).rename(tmp_path / "toy@1.0.0")
    message = rf"got {folder}: copy it to {tmp_path / 'toy'}$"
    with pytest.raises(BadParameter, match=message), exclusive(folder):
        pytest.fail("expected to be refused before")
    assert [path.name for path in tmp_path.iterdir()] == ["toy@1.0.0"]


def test_system_that_exchanges_no_folders_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(StartupError, match="no renameat2"), exclusive(folder):
        pytest.fail("expected to be refused before")
    assert {path.name for path in (tmp_path / f".{folder.name}").iterdir()} == {"lock"}
