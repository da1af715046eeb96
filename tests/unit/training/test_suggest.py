"""What the options leave open, chosen from the data."""

import json
from pathlib import Path

import numpy as np
import pytest

from app.training.fit.loop import LARGER_FIELDS, draw_shape
from app.training.fit.suggest import suggest_spacing
from app.training.recipe import Augmentation, Recipe
from tests.support.training_data import SMALL, landmarkd, write_specimens


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    data = write_specimens(tmp_path, "one", "two", "three")
    return data / "scans", data / "landmarks"


def test_landmarks_fit_the_image_at_the_suggested_spacing() -> None:
    points = np.array([[0.0, 0, 0], [10, 0, 0], [0, 20, 0], [np.nan] * 3])
    spacing = suggest_spacing([points, points])
    assert spacing * 64 >= np.hypot(10, 20)
    assert spacing == 0.36


def test_whole_grid_network_is_trained_on_shapes_that_its_divisor_divides() -> None:
    recipe = Recipe(spacing_mm=1.0, radius_mm=5.0)
    for shape in recipe.image_shapes():
        assert all(edge % recipe.divisor == 0 for edge in shape)
        assert abs(np.prod(shape) / 64**3 - 1) < 0.2


def test_flat_images_of_a_deep_network_keep_all_their_edges() -> None:
    """Others are a multiple of 32 voxels shorter along an axis, of which these have no more."""
    recipe = Recipe(
        spacing_mm=1.0, radius_mm=5.0, tile_shape=(32, 96, 96), filters=(24, 48, 96, 128, 128)
    )
    assert recipe.divisor == 32
    assert (32, 96, 96) in recipe.image_shapes()
    assert len(recipe.image_shapes()) > 1
    assert min(min(shape) for shape in recipe.image_shapes()) == 32


def test_images_of_a_larger_field_are_as_long_and_as_frequent_as_asked() -> None:
    recipe = Recipe(spacing_mm=1.0, radius_mm=5.0, augmentation=Augmentation(field=1.5))
    usual = set(recipe.image_shapes())
    shapes = np.array([draw_shape(recipe, np.random.default_rng(seed)) for seed in range(400)])
    assert not (shapes % recipe.divisor).any()
    longest = np.max(recipe.image_shapes()) * 1.5
    assert (shapes.max(axis=0) > 80).all()
    assert shapes.max() <= longest + recipe.divisor / 2
    share = np.mean([tuple(shape) not in usual for shape in shapes.tolist()])
    assert LARGER_FIELDS / 2 < share < LARGER_FIELDS * 1.5


def test_images_are_no_larger_unless_asked() -> None:
    recipe = Recipe(spacing_mm=1.0, radius_mm=5.0)
    shapes = {draw_shape(recipe, np.random.default_rng(seed)) for seed in range(100)}
    assert shapes == set(recipe.image_shapes())
    assert recipe.largest_shape == recipe.tile_shape


def test_a_check_without_a_folder_takes_no_choices_of_a_training_where_it_is_run(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a model folder, those of its checkpoint were shown for what the data suggest."""
    landmarkd("train", *folders, "-o", tmp_path / "mine", *SMALL, "--spacing", 3)
    monkeypatch.chdir(tmp_path / "mine")
    output = landmarkd("train", *folders, "--check")
    assert "as before" not in output
    assert "│ 3 mm" not in output


def test_images_of_a_deep_network_are_as_large_as_its_levels_need(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of seven levels, each halved by the next: 64 voxels were too few, and ended the training."""
    words = ("--filters", "4,4,4,4,4,4,8", "--tile", "whole")
    landmarkd("train", *folders, "-o", tmp_path / "mine", *SMALL, *words)
    record = json.loads((tmp_path / "mine" / "recipe.json").read_text())
    assert record["recipe"]["tile_shape"] == [128, 128, 128]
