"""Held-out errors -> the radius that 95 % stay within."""

from pathlib import Path

import numpy as np
import pytest
import torch

from app.loading import load_checked
from app.manifest import read_manifest
from models.calibrate import conformal_radius, left_out, sure_errors, write_radius
from models.validate import Errors
from tests.test_train import write_specimen
from tests.training_data import landmarkd

SMALL = ["--filters", "4,4,8", "--batch", "1", "--steps", "1", "--device", "cpu"]


def test_the_radius_is_the_split_conformal_one() -> None:
    """Of 99 errors the 95th; of 19 the largest; of fewer nothing can be said."""
    errors = np.random.default_rng(1).permutation(np.arange(1.0, 100.0))
    assert conformal_radius(errors) == 95.0
    assert conformal_radius(errors[:19]) == errors[:19].max()
    assert conformal_radius(errors[:18]) is None


def test_further_errors_stay_within_it_as_often_as_promised() -> None:
    """A thousand calibrations of 60 errors each, on errors of any distribution."""
    random = np.random.default_rng(2)
    draws = random.gamma(2.0, 0.2, (1000, 61))
    covered = [draw[60] <= (conformal_radius(draw[:60]) or 0.0) for draw in draws]
    assert 0.93 <= np.mean(covered) <= 0.98


def test_only_detected_landmarks_with_a_known_truth_count() -> None:
    """What is not sure has no region."""
    mm = np.array([[0.1, 0.2, np.nan], [0.3, 9.0, 0.4]])
    detected = np.array([[True, True, True], [True, False, True]])
    errors = Errors(("a", "b"), mm, np.isfinite(mm), detected, np.ones_like(detected))
    assert sure_errors(errors).tolist() == [0.1, 0.2, 0.3, 0.4]
    assert sure_errors(errors, [1]).tolist() == [0.3, 0.4]
    assert left_out(errors) == "too few scans"


@pytest.mark.parametrize("refined", [False, True])
def test_the_radius_is_written_where_the_answers_come_from(tmp_path: Path, refined: bool) -> None:
    """To the second model if there is one, whose hash is brought up to date."""
    for seed, name in enumerate(("one", "two")):
        write_specimen(tmp_path, name, seed)
    model = tmp_path / "mine"
    files = (tmp_path / "scans", tmp_path / "landmarks")
    landmarkd("train", *files, "-o", model, *SMALL)
    if refined:
        landmarkd("refine", model, *files, "--spacing", "1.0", *SMALL)
    write_radius(model, 0.4321)
    folder = model / "refine" if refined else model
    assert {mark.region95_mm for mark in read_manifest(folder).landmarks} == {0.432}
    assert load_checked(model, torch.device("cpu")).manifest.name == "mine"
