"""The frame of a second network."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy.spatial.transform import Rotation

from app.errors import ModelRefused
from app.io import read_volume
from app.model import read_manifest
from app.preprocessing import Pose, index_grid, make_grid, make_posed_grid
from app.training import pipeline
from app.training.data.specimens import Specimen
from app.training.files import RECORD
from app.training.fit.augment import draw_centre
from app.training.fit.canonical_pose import pose_specimen, rotate_like, upright
from app.training.recipe import Augmentation
from tests.support.training_data import (
    BLOBS,
    SMALL,
    TYPICAL,
    landmarkd,
    make_affine,
    points_of,
    write_specimens,
)

CPU = torch.device("cpu")


def test_a_mean_shape_is_rotated_upright_not_mirrored() -> None:
    """Its longest extent comes first; distances and handedness stay."""
    mean = np.random.default_rng(1).normal(size=(20, 3)) * (1.0, 5.0, 2.0)
    mean -= mean.mean(axis=0)
    turned = upright(mean)
    spread = turned.std(axis=0)
    assert spread[0] > spread[1] > spread[2]
    np.testing.assert_allclose(turned @ turned.T, mean @ mean.T, atol=1e-9)
    assert np.linalg.det(turned[:3]) == pytest.approx(np.linalg.det(mean[:3]))


@pytest.mark.parametrize("kept", [6, 4, 3])
def test_images_of_a_posed_specimen_are_centred_as_in_service(kept: int) -> None:
    """On the origin of the mean shape's frame, whichever landmarks the specimen lacks."""
    mean = TYPICAL - TYPICAL.mean(axis=0)
    points = np.stack(list(points_of(1).values()))
    points[kept:] = np.nan
    specimen = Specimen(torch.zeros(2, 2, 2), make_affine(1), points)
    posed, random = pose_specimen(specimen, mean), np.random.default_rng(0)
    centre = draw_centre(posed, np.full(3, 9.0), Augmentation(), random)
    np.testing.assert_allclose(centre, 0.0, atol=1e-9)
    if kept == len(points):  # The middle of the landmarks, to the last bit.
        assert (centre == posed.points.mean(axis=0)).all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_specimens(tmp_path_factory.mktemp("data"), "one", "two", "three")


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a first and a second network for a step each."""
    model = tmp_path_factory.mktemp("models") / "mine"
    files = (data / "scans", data / "landmarks")
    landmarkd("train", *files, "-o", model, *SMALL)
    landmarkd("refine", model, *files, "--validate", "two", "--spacing", "1.0", *SMALL)
    return model


def test_a_second_network_holds_out_what_the_first_one_did(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    model = shutil.copytree(folder, tmp_path / "mine")

    def choices() -> str:
        words = (data / "scans", data / "landmarks", "--spacing", "1.0", *SMALL, "--check")
        return " ".join(landmarkd("refine", model, *words).split())

    (model / RECORD).write_text(json.dumps({"held_out": ["one"]}))
    assert "│ --validate │ two │ as before │" in choices()
    shutil.rmtree(model / "refine")
    assert "│ --validate │ one │ those of the first network │" in choices()
    (model / RECORD).unlink()
    assert "The first network may have been trained on them! │" in choices()


def test_a_warm_started_second_network_keeps_the_pose_of_its_weights(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Principal axes may come out the other way round for other specimens."""
    turned = np.diag([-1.0, -1.0, 1.0])
    monkeypatch.setattr(pipeline, "upright", lambda mean: upright(mean) @ turned)
    shutil.copytree(folder, tmp_path / "mine", ignore=shutil.ignore_patterns("refine"))
    words = (data / "scans", data / "landmarks", "--spacing", "1.0", *SMALL, "--validate", "two")
    landmarkd("refine", tmp_path / "mine", *words, "--start", folder / "refine")
    before, after = (
        load_file(model / "refine" / "shape.safetensors")["mean"]
        for model in (folder, tmp_path / "mine")
    )
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_only_a_network_of_one_pose_rotates_a_mean_shape(folder: Path) -> None:
    mean = load_file(folder / "refine" / "shape.safetensors")["mean"].astype(np.float64)
    other = Rotation.from_rotvec([0.4, -2.0, 0.9]).apply(mean)
    names = (*BLOBS[1:], BLOBS[0])
    moved = np.roll(other, -1, axis=0)
    np.testing.assert_allclose(
        rotate_like(moved, names, folder / "refine"), np.roll(mean, -1, axis=0), atol=1e-6
    )
    assert rotate_like(other, BLOBS, folder) is other
    assert rotate_like(other, [f"another {name}" for name in BLOBS], folder / "refine") is other
    with pytest.raises(ModelRefused, match=r"nothing: model\.toml: expected a file"):
        rotate_like(other, BLOBS, folder / "nothing")


def test_a_second_network_is_trained_on_the_values_of_service_for_subjects_of_any_size(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Specimen] = []

    def keep(*given: Any) -> bool:
        trained.extend(given[2])
        return True

    monkeypatch.setattr(pipeline, "train", keep)
    shutil.copytree(folder, tmp_path / "mine", ignore=shutil.ignore_patterns("refine"))
    words = (data / "scans", data / "landmarks", "--spacing", "1.5", *SMALL, "--validate", "none")
    landmarkd("refine", tmp_path / "mine", *words)
    spec = read_manifest(folder).input
    fine = read_manifest(folder / "refine").input.model_copy(update={"spacing_mm": (1.5,) * 3})
    scales = []
    for scan, one in zip(sorted((data / "scans").iterdir()), trained, strict=True):
        volume = read_volume(scan.read_bytes())
        window = make_grid(volume, spec, CPU).window
        assert window is not None
        to_world = volume.affine @ np.linalg.inv(one.to_world)
        scales.append(float(np.cbrt(np.linalg.det(to_world[:3, :3]))))
        grid = make_posed_grid(volume, Pose(to_world, scales[-1]), fine, window, CPU)
        values = one.values_at(index_grid(grid.voxels.shape, grid.to_volume))
        # The service keeps values in 16 bits here.
        torch.testing.assert_close(values, grid.voxels, rtol=0, atol=2.0**-15)
    assert np.ptp(scales) > 0.2
