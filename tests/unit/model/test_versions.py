"""Several versions of a model are side by side, and a name means one of them."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadParameter, ModelRefused, UnknownModel
from app.inference.load import load_checked
from app.model.registry import Registry
from app.model.versions import choose_version, newest_first, version_key
from tests.support.model_folders import make_model_folder

ORDER = [
    "draft", "0.9", "0.10", "1.0.0-alpha.2", "1.0.0-alpha.10", "1.0.0-rc1", "1.0.0", "1.0.1",
    "1.10", "2026-10", "2026",
]  # fmt: skip


def test_versions_are_ordered_by_numbers_and_suffixes_come_before() -> None:
    assert sorted(sorted(ORDER), key=version_key) == ORDER
    assert version_key("1.0+build7") == version_key("1.0")


@given(st.lists(st.text(max_size=8), min_size=2, max_size=4))
def test_any_texts_can_be_compared(versions: list[str]) -> None:
    sorted(versions, key=version_key)


def test_name_without_a_version_means_the_newest() -> None:
    known = [("a", "a", "1.9"), ("a@1.10", "a", "1.10"), ("b", "b", "7")]
    assert choose_version("a", known) == "a@1.10"
    assert choose_version("a@1.9", known) == "a"
    assert choose_version("a@1.1", known) is None
    assert choose_version("c", known) is None
    assert choose_version("a@", known) is None


def test_folders_are_listed_by_name_the_newest_version_first() -> None:
    ordered = ["a", "a@10.0", "a@9.0+y", "a@9.0+x", "a@9.0-rc1", "a@", "a-b@1", "b@2", "b@1"]
    assert newest_first(sorted(ordered)) == newest_first(ordered[::-1]) == ordered


def test_of_the_same_version_twice_the_folder_of_that_name_is_meant() -> None:
    known = [("a@1.0", "a", "1.0"), ("a", "a", "1.0")]
    assert choose_version("a", known) == "a"
    assert choose_version("a@1.0", known) == "a@1.0"


def versioned(root: Path, version: str, threshold: float, *, name: str = "toy") -> Path:
    """Make a model of a version in a folder that says so."""
    made = make_model_folder(root, name, voting={"threshold": threshold})
    text = (made / "model.toml").read_text()
    (made / "model.toml").write_text(text.replace('version = "1.0.0"', f'version = "{version}"'))
    return made.rename(root / f"{name}@{version}")


def test_registry_serves_versions_side_by_side(tmp_path: Path) -> None:
    versioned(tmp_path, "1.10.0", 0.5)
    versioned(tmp_path, "1.9.0", 0.4)
    make_model_folder(tmp_path)
    registry = Registry(tmp_path, partial(load_checked, device=torch.device("cpu")))
    registry.load_all()
    assert not registry.refusals
    thresholds = {
        name: registry.get(name).manifest.voting.threshold
        for name in (None, "toy", "toy@1.10.0", "toy@1.9.0", "toy@1.0.0")
    }
    assert thresholds == {
        None: 0.5, "toy": 0.5, "toy@1.10.0": 0.5, "toy@1.9.0": 0.4, "toy@1.0.0": 0.3,
    }  # fmt: skip
    versions = r"one of toy@1\.10\.0, toy@1\.9\.0, toy@1\.0\.0; got 'toy@2'"
    with pytest.raises(UnknownModel, match=versions):
        registry.get("toy@2")
    make_model_folder(tmp_path, "other")
    registry.reload("other")
    with pytest.raises(BadParameter):
        registry.get()


def test_folder_of_another_version_than_its_manifest_is_refused(tmp_path: Path) -> None:
    folder = versioned(tmp_path, "1.9.0", 0.4).rename(tmp_path / "toy@2.0.0")
    with pytest.raises(ModelRefused, match=r"toy@2\.0\.0: name: expected the folder's name"):
        load_checked(folder, torch.device("cpu"))


def test_version_whose_folder_is_gone_serves_until_its_reload_is_asked_for(tmp_path: Path) -> None:
    versioned(tmp_path, "1.0", 0.25)
    new = versioned(tmp_path, "1.1", 0.25)
    registry = Registry(tmp_path, partial(load_checked, device=torch.device("cpu")))
    registry.load_all()
    loaded = registry.get("toy")
    (new / "model.toml").unlink()
    with pytest.raises(UnknownModel):
        registry.reload(new.name)
    assert registry.get("toy") is loaded, "expected a folder that is being changed to serve on"
    shutil.rmtree(new)
    assert registry.get("toy") is loaded
    with pytest.raises(UnknownModel, match=r"found: toy@1\.0$"):
        registry.reload(new.name)
    assert registry.get("toy").manifest.version == "1.0"
    assert list(registry.models) == ["toy@1.0"]
