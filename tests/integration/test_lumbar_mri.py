"""The shipped lumbar-mri model on spines: whole, in other contrasts, and not there.

It has learned from all of them; what it does on others is measured by ``make bench``.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from app.geometry import transform
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.slicer import read_landmarks
from app.training.calibrate.synthetic_crops import blanks
from app.training.data.check_frames import read_in_frame
from app.training.evaluate.measured import compare_measurements
from app.training.evaluate.metrics import errors_mm, measure_coverage
from app.training.evaluate.outcomes import Outcome, validate_scan
from tests.support.skulls import BRAINS, read_brain, read_skull
from tests.support.spines import (
    AMBIGUOUS,
    CONTRASTS,
    LORDOSIS,
    MISLAID,
    MODEL,
    SUBJECTS,
    UNLIKE_ALL,
    WORSE,
    read_spine,
    spine_files,
)

CENTRE_MM = 1.2
CORNER_MM = 2.0
IDENTIFIED = 0.98


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector(load_checked(MODEL, torch.device("cpu")))


@pytest.fixture(scope="module")
def outcomes(detector: Detector, data_dir: Path) -> tuple[Outcome, ...]:
    files = [spine_files(data_dir, name) for name in SUBJECTS]
    return tuple(
        one for each in files for one in validate_scan(detector, each.name, *read_in_frame(each))
    )


def test_errors_hold_their_bar(outcomes: tuple[Outcome, ...]) -> None:
    centres = [one for one in outcomes if one.group == "centre"]
    corners = [one for one in outcomes if one.group == "corner"]
    assert (len(centres), len(corners)) == (5 * len(SUBJECTS), 20 * len(SUBJECTS))
    assert errors_mm(centres).mean() <= CENTRE_MM
    assert errors_mm(corners).mean() <= CORNER_MM
    assert np.mean([one.identified for one in centres]) >= IDENTIFIED


def test_regions_hold_nearly_all_errors(outcomes: tuple[Outcome, ...]) -> None:
    within, told = measure_coverage(outcomes)
    assert told >= 0.9 * len(outcomes)
    assert 0.9 <= within / told <= 0.99


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_levels_are_named_rightly_in_another_contrast(
    detector: Detector, data_dir: Path, contrast: str
) -> None:
    name = SUBJECTS[3]
    truth = read_landmarks(spine_files(data_dir, name).landmarks)
    found = detector.detect(CONTRASTS[contrast](read_spine(data_dir, name))).landmarks
    for landmark in found:
        if landmark.status == "detected":
            assert landmark.ras_mm is not None
            assert np.linalg.norm(landmark.ras_mm - truth[landmark.name]) < 10.0


@pytest.mark.parametrize("kind", ["noise of 4 standard deviations", "smoothed by 16 mm"])
def test_regions_are_wider_in_scans_that_are_worse(
    detector: Detector, data_dir: Path, kind: str
) -> None:
    """Those of a clear scan held three of four errors in the one, and half of them in the other."""
    name = SUBJECTS[2]
    truth = read_landmarks(spine_files(data_dir, name).landmarks)
    volume = read_spine(data_dir, name)
    clear, worse = detector.detect(volume), detector.detect(WORSE[kind](volume))
    before = {one.name: one.region95_mm for one in clear.landmarks}
    within = []
    for landmark in worse.landmarks:
        if (radius_mm := landmark.region95_mm) is not None:
            assert radius_mm > 1.5 * (before[landmark.name] or 0.0)
            error_mm = np.linalg.norm(np.array(landmark.ras_mm) - truth[landmark.name])
            within.append(error_mm <= radius_mm)
    assert len(within) >= 20
    assert np.mean(within) >= 0.9
    assert [warning[:13] for warning in worse.warnings] == ["Votes scatter"]
    assert not clear.warnings


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_no_level_is_sure_where_neither_sacrum_nor_ribs_are_shown(
    detector: Detector, data_dir: Path, name: str, kind: str
) -> None:
    found = detector.detect(AMBIGUOUS[kind](read_spine(data_dir, name)))
    statuses = [landmark.status for landmark in found.landmarks]
    assert statuses.count("low_confidence") >= 5
    assert statuses.count("detected") == 0
    assert any("Which landmark is which is doubtful" in warning for warning in found.warnings)
    assert all(landmark.region95_mm is None for landmark in found.landmarks)


def test_no_level_is_sure_where_another_arrangement_has_nearly_as_many_votes(
    detector: Detector, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of these spines the model is surer than that, so fewer votes have to do."""
    monkeypatch.setattr("app.voting.constellation.MIN_RIVAL_MASS", 0.05)
    monkeypatch.setattr("app.voting.constellation.MIN_RIVAL_COUNT", 0.1)
    answers = [detector.detect(read_spine(data_dir, name)) for name in SUBJECTS]
    doubted = [
        answer
        for answer in answers
        if any("another arrangement" in warning for warning in answer.warnings)
    ]
    assert doubted
    for answer in doubted:
        assert {landmark.status for landmark in answer.landmarks} <= {
            "low_confidence",
            "out_of_field",
        }


@pytest.mark.parametrize("kind", MISLAID)
def test_no_level_is_sure_where_the_patient_does_not_lie_as_the_affine_says(
    detector: Detector, data_dir: Path, kind: str
) -> None:
    """The second network detects whatever the first one has taken for the lumbar spine."""
    name = "subject-40"
    volume, world_from_truth = MISLAID[kind](read_spine(data_dir, name))
    truth = read_landmarks(spine_files(data_dir, name).landmarks)
    answer = detector.detect(volume)
    assert any("as the file says" in warning for warning in answer.warnings)
    found = [one for one in answer.landmarks if one.ras_mm is not None]
    away_mm = [
        np.linalg.norm(one.ras_mm - transform(world_from_truth, truth[one.name])) for one in found
    ]
    assert max(away_mm) > 30.0
    assert {one.status for one in found} == {"low_confidence"}
    assert all(one.region95_mm is None for one in found)


@pytest.mark.parametrize("kind", UNLIKE_ALL)
def test_no_position_is_sure_where_the_spine_is_unlike_all_patients(
    detector: Detector, data_dir: Path, kind: str
) -> None:
    """The networks find it all the same, where the file says, which is not where it is."""
    volume, _ = UNLIKE_ALL[kind](read_spine(data_dir, "subject-40"))
    answer = detector.detect(volume)
    assert any("All positions are doubtful" in warning for warning in answer.warnings)
    found = [one for one in answer.landmarks if one.ras_mm is not None]
    assert len(found) >= 20
    assert {one.status for one in found} == {"low_confidence"}
    assert all(one.region95_mm is None for one in found)


def test_what_is_no_spine_shows_none_and_a_warning_says_what_was_expected(
    detector: Detector, data_dir: Path
) -> None:
    scans = [read_brain(data_dir, BRAINS[0]), read_skull(data_dir, "NU_J")]
    for volume in (*scans, *blanks(read_spine(data_dir, SUBJECTS[0]))):
        answer = detector.detect(volume)
        detected = [one for one in answer.landmarks if one.status == "detected"]
        assert len(detected) <= 1
        told = [one for one in answer.warnings if "No landmark is detected" in one]
        assert len(told) == (not detected)
        assert all("lumbar spine (L1 to L5) in MRI" in warning for warning in told)


def test_lordosis_and_its_interval_hold_their_bar(
    detector: Detector, outcomes: tuple[Outcome, ...]
) -> None:
    specs = detector.model.manifest.measurements
    assert len(specs) == 1 + 4 + 8 + 4
    deviations = compare_measurements(specs, outcomes)
    lordosis = [one for one in deviations if one.spec.name == LORDOSIS]
    assert len(lordosis) == len(SUBJECTS)
    assert all(one.found > 0 for one in lordosis)
    assert np.mean([one.error for one in lordosis]) <= 3.0
    held = [one.error <= one.half_width for one in deviations if one.half_width is not None]
    assert len(held) >= 0.9 * len(deviations)
    assert 0.9 <= np.mean(held) <= 0.99
