"""The second-stage network: how its landmarks are merged, and how it is trained and loaded."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import ModelRefused
from app.geometry import Points, scaling, transform, translation
from app.inference.detector import MAX_EXTRA_VIEWS, Detector
from app.inference.load import load_checked
from app.inference.refinement import (
    SAME_POSE_RADII,
    Refiner,
    any_detected,
    find_pose,
    has_enough_votes,
    merge_stages,
)
from app.io.schemas import Status
from app.io.volume import Volume, read_volume
from app.model import Shape
from app.model.editing import editing, update_hashes
from app.preprocessing.grid import Grid, make_grid
from app.preprocessing.posed_grid import Pose
from app.voting.landmarks import Landmark
from tests.support.training_data import BLOBS, landmarkd, write_specimens
from tests.unit.preprocessing.test_posed_grid import make_pose

HERE, NEAR, FAR = np.zeros(3), np.array([0.3, 0.0, 0.0]), np.array([0.0, 5.0, 0.0])
SMALL = ["--filters", "4,4,8", "--batch", "1", "--steps", "2", "--device", "cpu"]


SKULLS = Path(__file__).resolve().parents[3] / "models" / "mouse-skull"


def noise(shape: tuple[int, int, int]) -> np.ndarray:
    """Voxels that all differ."""
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def landmark(
    place: Points | None, status: Status = "detected", confidence: float = 0.9, name: str = "a"
) -> Landmark:
    """Make a landmark that lies somewhere."""
    return Landmark(
        name=name,
        description="",
        status=status,
        ijk=place,
        ras_mm=place,
        confidence=confidence,
        mass=0.8,
        coherence=0.9,
        spread_mm=0.1,
        region95_mm=0.3,
        disagreement_mm=0.1,
        expected_ras_mm=None,
        candidates=(),
    )


def test_landmark_that_both_stages_locate_has_the_second_position() -> None:
    """With the first one's names."""
    (answer,) = merge_stages([landmark(HERE, name="tip")], [landmark(NEAR, name="x")], 1.0)
    assert (answer.name, answer.status) == ("tip", "detected")
    assert answer.ras_mm is NEAR
    (found,) = merge_stages([landmark(None, "not_found", 0.0)], [landmark(NEAR)], 1.0)
    assert found.status == "detected"


def test_what_only_the_first_stage_locates_has_low_confidence() -> None:
    """It looked closer; what neither finds is missing."""
    gone = landmark(None, "not_found", 0.1)
    (answer,) = merge_stages([landmark(HERE, confidence=0.9)], [gone], 1.0)
    assert (answer.status, answer.confidence) == ("low_confidence", 0.45)
    assert answer.ras_mm is HERE
    assert answer.region95_mm is None
    (missing,) = merge_stages([landmark(None, "not_found", 0.2)], [gone], 1.0)
    assert (missing.status, missing.ras_mm) == ("not_found", None)


def test_what_the_second_stage_detects_is_final() -> None:
    """It sees more, and its own constellation agrees."""
    (answer,) = merge_stages([landmark(HERE, confidence=0.9)], [landmark(FAR, confidence=0.6)], 1.0)
    assert (answer.status, answer.confidence) == ("detected", 0.6)
    assert answer.ras_mm is FAR


def test_of_two_positions_the_more_confident_one_is_returned_with_low_confidence() -> None:
    """Further apart than the tolerance, and the second network is in doubt."""
    doubtful = landmark(FAR, "low_confidence", confidence=0.6)
    (first,) = merge_stages([landmark(HERE, confidence=0.9)], [doubtful], 1.0)
    assert (first.status, first.confidence) == ("low_confidence", 0.45)
    assert first.ras_mm is HERE
    (second,) = merge_stages([landmark(HERE, confidence=0.5)], [doubtful], 1.0)
    assert (second.status, second.confidence) == ("low_confidence", 0.3)
    assert second.ras_mm is FAR


def test_what_the_second_stage_sees_outside_the_scan_is_out_of_field() -> None:
    """Whatever the first one says; its place in the scan would be a wrong one."""
    outside = landmark(None, "out_of_field", confidence=0.7)
    for before in (landmark(None, "not_found", 0.0), landmark(HERE, confidence=0.9)):
        (answer,) = merge_stages([before], [outside], 1.0)
        assert (answer.status, answer.ras_mm) == ("out_of_field", None)


def test_another_view_needs_votes_and_no_detected_landmark() -> None:
    some = [landmark(HERE, "low_confidence")] * 4
    blank = [replace(mark, mass=0.0) for mark in some]
    assert not any_detected(some)
    assert any_detected([*some, landmark(HERE)])
    assert has_enough_votes(some)
    assert not has_enough_votes(blank + some[:3])


def test_the_pose_is_that_of_the_landmarks_that_agree() -> None:
    """Two of nine lie elsewhere, one was not found."""
    random = np.random.default_rng(3)
    mean = random.uniform(-9, 9, (9, 3))
    pose = make_pose(7, scale=1.1)
    places = transform(pose.to_world, mean)
    places[2] += 15.0
    places[5] -= 12.0
    found = [landmark(place) for place in places]
    found[8] = landmark(None, status="not_found", confidence=0.0)
    fit = find_pose(found, Shape(mean, tolerance_mm=1.0))
    assert fit is not None
    np.testing.assert_allclose(fit.to_world, pose.to_world, atol=1e-6)
    assert fit.scale == pytest.approx(1.1)


def test_too_few_landmarks_show_no_pose() -> None:
    """Three fit anything."""
    mean = np.random.default_rng(3).uniform(-9, 9, (9, 3))
    nowhere = landmark(None, status="not_found", confidence=0.0)
    found = [landmark(place) for place in mean[:3]] + [nowhere] * 6
    assert find_pose(found, Shape(mean, tolerance_mm=1.0)) is None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_specimens(tmp_path_factory.mktemp("data"), "one", "two", "three")


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a first and a second network for two steps each."""
    model = tmp_path_factory.mktemp("models") / "mine"
    files = (data / "scans", data / "landmarks")
    landmarkd("train", *files, "-o", model, *SMALL)
    landmarkd("refine", model, *files, "--validate", "two", "--spacing", "1.0", *SMALL)
    return model


def test_training_writes_a_second_model_that_loads_and_runs(folder: Path, data: Path) -> None:
    """Weights of two steps find nothing, but everything is there."""
    model = load_checked(folder, torch.device("cpu"))
    assert model.refine is not None
    assert [mark.name for mark in model.refine.manifest.landmarks] == list(BLOBS)
    assert model.refine.manifest.input.tile_shape != "whole"
    shape = model.refine.shape
    assert shape is not None
    np.testing.assert_allclose(shape.mean.mean(axis=0), 0, atol=0.5)
    scan = next((data / "scans").glob("one*")).read_bytes()
    assert len(Detector(model).detect(read_volume(scan)).landmarks) == len(BLOBS)


def test_a_scan_is_resampled_once_in_however_many_orientations_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Grid] = []

    def note_grid(*given: Any) -> Grid:
        made.append(make_grid(*given))
        return made[-1]

    monkeypatch.setattr("app.inference.detector.make_grid", note_grid)
    # Noise shows no skull, and too little for a second look at it.
    monkeypatch.setattr("app.inference.detector.has_enough_votes", lambda _: True)
    detector = Detector(load_checked(SKULLS, torch.device("cpu")))
    made.clear()
    volume = Volume(noise((24, 28, 32)), np.diag([0.4, 0.4, 0.4, 1.0]))
    assert detector.detect(volume).tiles == 1 + MAX_EXTRA_VIEWS
    assert len(made) == 1


@pytest.mark.parametrize("size", [1.0, 0.6])
def test_another_refine_pass_follows_if_the_landmarks_show_another_pose(
    folder: Path, size: float
) -> None:
    """Not for the same one, up to what it has learned to bear, nor where it shows none.

    That is less in a smaller subject, which it sees as large as others.
    """
    model = load_checked(folder, torch.device("cpu")).refine
    assert model is not None
    assert model.shape is not None
    refiner = Refiner(model, tolerance_mm=1.0)
    pose = Pose(translation((3.0, -2.0, 40.0)) @ scaling([size] * 3), size)
    radius = size * model.manifest.voting.radius_mm
    for off, again in ((0.9, False), (1.1, True)):
        moved = translation((0.0, off * SAME_POSE_RADII * radius, 0.0)) @ pose.to_world
        found = [landmark(place) for place in transform(moved, model.shape.mean)]
        improved = refiner.improve_pose(found, pose)
        assert (improved is not None) == again
        if improved is not None:
            np.testing.assert_allclose(improved.to_world, moved, atol=1e-6)
    assert refiner.improve_pose([landmark(None, "not_found", 0.0)] * len(BLOBS), pose) is None


def test_a_changed_second_model_is_refused_until_its_hash_is_brought_up_to_date(
    folder: Path,
) -> None:
    """The first folder's model.toml vouches for the second's."""
    inner = folder / "refine" / "model.toml"
    inner.write_text(inner.read_text() + "\n# changed\n")
    with pytest.raises(ModelRefused, match=re.escape("refine.sha256")):
        load_checked(folder, torch.device("cpu"))
    with editing(folder) as document:
        update_hashes(folder, document)
    assert load_checked(folder, torch.device("cpu")).refine is not None
