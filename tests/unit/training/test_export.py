"""What training writes into a ``model.toml``, and what it leaves as people wrote it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.errors import ModelRefused
from app.model import read_manifest
from app.training.fit.export import check_exportable, write_model_folder
from app.training.fit.network import build_network
from app.training.recipe import Recipe

NAMES = ("a", "b", "c", "d")
MEAN = np.array([[0.0, 0, 0], [10, 0, 0], [0, 12, 0], [0, 0, 9]])
RECIPE = Recipe(spacing_mm=2.0, radius_mm=10.0, filters=(4, 4, 8))


def write(folder: Path, recipe: Recipe = RECIPE) -> None:
    write_model_folder(folder, build_network(recipe, len(NAMES)), recipe, NAMES, MEAN)


def edit(folder: Path, changes: dict[str, str]) -> None:
    path = folder / "model.toml"
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "mine")
    return tmp_path / "mine"


def test_what_people_tuned_stays_with_their_comments_while_the_voting_radius_does(
    folder: Path,
) -> None:
    edit(
        folder,
        {
            "threshold = 0.3": "threshold = 0.2  # fewer votes in noise",
            "modes = 4": "modes = 8",
            "tolerance_mm = 6.0": "tolerance_mm = 7.5  # this line varies",
            'name = "b"\n': 'name = "b"\n# at its tip\npresence_threshold = 0.4\n',
        },
    )
    written = (folder / "model.toml").read_text(encoding="utf-8")
    before = read_manifest(folder).network.sha256
    write(folder)
    after = read_manifest(folder).network.sha256
    assert after != before
    text = (folder / "model.toml").read_text(encoding="utf-8")
    assert text == written.replace(before, after)
    write(folder, replace(RECIPE, radius_mm=20.0))
    manifest = read_manifest(folder)
    assert manifest.shape is not None
    assert (manifest.voting.threshold, manifest.shape.modes) == (0.3, 4)
    assert manifest.shape.tolerance_mm == 12.0


def test_output_of_a_trained_network_is_not_read_like_that_of_the_one_it_replaces(
    folder: Path,
) -> None:
    """Offsets in voxels of 2 mm were taken for mm."""
    edit(folder, {"output_stride = 2": 'output_stride = 2\noffset_unit = "mm"\nmirror = ["i"]'})
    assert read_manifest(folder).network.offset_unit == "mm"
    write(folder)
    network = read_manifest(folder).network
    assert (network.offset_unit, network.offset_order) == ("voxel", "axis")
    assert network.mirror == ("i",)


def test_surroundings_of_a_landmark_that_no_scan_shows_are_refused_before_training(
    folder: Path,
) -> None:
    """The service would refuse the trained model: what tells look-alikes apart has no place."""
    place = '[[shape.surroundings]]\nbeyond = "d"\nseen_from = "a"\nmm = 20.0\n'
    edit(folder, {'[[landmarks]]\nname = "a"': place + '\n[[landmarks]]\nname = "a"'})
    check_exportable(folder, RECIPE, NAMES, MEAN)
    unknown = MEAN.copy()
    unknown[3] = np.nan
    with pytest.raises(ModelRefused, match=r"^mine: shape\.surroundings: expected landmarks"):
        check_exportable(folder, RECIPE, NAMES, unknown)
