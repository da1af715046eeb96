"""Held-out scans -> regions and presence thresholds."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from app.cli.main import app
from app.inference.load import load_checked
from app.model.manifest import read_manifest
from app.training.calibrate.calibration import conclude, write_calibration
from app.training.calibrate.calibration_runs import Trial, try_scan
from app.training.calibrate.regions import (
    calibrate_regions,
    conformal_region,
    left_out,
    promise_of,
    sure_errors,
)
from app.training.calibrate.thresholds import calibrate_thresholds
from app.training.evaluate.outcomes import Outcome, choose_pairs
from app.training.options import Missing
from tests.support.model_folders import make_model_folder
from tests.support.outcomes import outcome
from tests.support.training_data import landmarkd
from tests.unit.training.test_train import NAMES, write_specimen

SMALL = ["--filters", "4,4,8", "--batch", "1", "--steps", "1", "--device", "cpu"]


def test_the_region_is_the_split_conformal_one() -> None:
    """Of 99 errors the 95th; of 19 the largest; of fewer nothing can be said."""
    errors = np.random.default_rng(1).permutation(np.arange(1.0, 100.0))
    region = conformal_region(errors, own=True)
    assert region is not None
    assert (region.radius_mm, region.errors, region.promise) == (95.0, 99, 0.95)
    largest = conformal_region(errors[:19], own=True)
    assert largest is not None
    assert (largest.radius_mm, largest.promise) == (errors[:19].max(), 0.95)
    assert conformal_region(errors[:18], own=True) is None
    assert promise_of(18) == pytest.approx(18 / 19)


def test_further_errors_stay_within_it_as_often_as_promised() -> None:
    """A thousand calibrations of 60 errors each, on errors of any distribution."""
    random = np.random.default_rng(2)
    covered = []
    for draw in random.gamma(2.0, 0.2, (1000, 61)):
        region = conformal_region(draw[:60], own=True)
        covered.append(region is not None and draw[60] <= region.radius_mm)
    assert 0.93 <= np.mean(covered) <= 0.98


def test_a_landmark_with_enough_errors_has_a_region_of_its_own() -> None:
    easy = [outcome(0.01 * i, landmark="easy", scan=f"s{i}") for i in range(1, 20)]
    hard = [outcome(3.0, landmark="hard"), outcome(9.0, landmark="hard", status="low_confidence")]
    regions = calibrate_regions([*easy, *hard], ["easy", "hard", "unseen"])
    assert regions is not None
    assert (regions["easy"].radius_mm, regions["easy"].own) == (0.19, True)
    assert (regions["hard"].radius_mm, regions["hard"].errors) == (3.0, 20)
    assert not regions["hard"].own
    assert regions["unseen"] == regions["hard"]


def test_only_detected_landmarks_with_a_known_truth_count() -> None:
    """What is not sure has no region."""
    some = [outcome(0.1), outcome(9.0, status="low_confidence"), outcome(), outcome(0.4, scan="b")]
    assert sure_errors(some).tolist() == [0.1, 0.4]
    assert calibrate_regions(some, ["a"]) is None
    assert left_out(some, ["a"]) == {}


def test_each_scan_is_held_against_the_regions_of_the_others() -> None:
    errors = [outcome(0.1 * i, scan="near", landmark=str(i)) for i in range(20)]
    errors += [outcome(0.15 * i, scan="far", landmark=str(i)) for i in range(20)]
    shares = left_out(errors, [str(i) for i in range(20)])
    assert shares == {"near": 1.0, "far": pytest.approx(13 / 20)}


def masses(present: list[float], absent: list[float], landmark: str = "a") -> list[Outcome]:
    """Make outcomes of these masses."""
    return [outcome(0.1, mass=mass, landmark=landmark) for mass in present] + [
        outcome(mass=mass, landmark=landmark, present=False, status="not_found") for mass in absent
    ]


def test_a_threshold_is_the_geometric_middle_between_present_and_absent_masses() -> None:
    chosen = calibrate_thresholds(masses([0.9] * 30, [0.1] * 30), ["a", "b"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.3, 0.3))
    assert chosen.own == 1


def test_landmarks_of_unknown_presence_say_nothing_of_absence() -> None:
    unsure = [outcome(mass=0.9, present=False, known=False) for _ in range(30)]
    chosen = calibrate_thresholds([*masses([0.9] * 30, [0.1] * 30), *unsure], ["a"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.3,))


def test_absence_that_left_no_mass_does_not_pull_the_threshold_to_nothing() -> None:
    chosen = calibrate_thresholds(masses([0.8] * 30, [0.0] * 30), ["a"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.2,))


def test_one_mass_in_fifty_may_lie_on_the_wrong_side() -> None:
    present, absent = [0.01, *[0.9] * 99], [0.89, *[0.1] * 99]
    chosen = calibrate_thresholds(masses(present, absent), ["a"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.3,))


def test_answers_far_from_the_truth_say_nothing_of_presence() -> None:
    wrong = [outcome(5.0, mass=0.001) for _ in range(30)]
    chosen = calibrate_thresholds([*masses([0.9] * 30, [0.1] * 30), *wrong], ["a"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.3,))


def test_a_landmark_with_few_masses_shares_the_threshold_of_all() -> None:
    some = masses([0.9] * 100, [0.1] * 100) + masses([0.4] * 3, [0.1] * 18, "rare")
    chosen = calibrate_thresholds(some, ["a", "rare"], 2.0)
    assert chosen is not None
    assert chosen.own == 1
    assert chosen.values[1] == pytest.approx(
        (0.1 * np.percentile([0.9] * 100 + [0.4] * 3, 2)) ** 0.5
    )
    assert calibrate_thresholds(masses([0.9] * 18, [0.1] * 30), ["a"], 2.0) is None


def trials(scans: int, landmarks: int = 3) -> list[Trial]:
    """Make trials of a model that finds all that is there, and answers little where nothing is."""
    made = []
    for scan in range(scans):
        name = f"scan_{scan}"
        there = tuple(
            outcome(0.01 * (scan + 1), scan=name, landmark=str(mark + 1), mass=0.9)
            for mark in range(landmarks)
        )
        gone = tuple(
            outcome(scan=name, landmark=str(mark + 1), mass=0.1, present=False, status="not_found")
            for mark in range(landmarks)
        )
        made += [Trial(name, "whole", (there,), there), Trial(name, "half", (gone,), gone)]
        made.append(Trial(name, "blank", (gone,), gone))
    return made


def conclude_on(folder: Path, made: list[Trial]) -> str:
    text = io.StringIO()
    model = load_checked(folder, torch.device("cpu"))
    conclude(folder, model, made, made, Console(file=text, width=400))
    return text.getvalue()


def test_what_is_concluded_is_said_and_written(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    text = conclude_on(folder, trials(10))
    assert "0.300 to 0.300 (was 0.250 to 0.250), 0 of 3 landmarks by their own masses" in text
    assert "3 landmarks share one of 0.100 mm, of 30 errors of all landmarks" in text
    assert "a further error stays within with 96.8 %" in text
    assert "half 0 30 0.0 % 0.0 %" in " ".join(text.split())
    marks = read_manifest(folder).landmarks
    assert {mark.presence_threshold for mark in marks} == {0.3}
    assert {mark.region95_mm for mark in marks} == {0.1}
    assert load_checked(folder, torch.device("cpu")).manifest.name == "toy"


def test_landmarks_with_nineteen_scans_are_said_to_have_regions_of_their_own(
    tmp_path: Path,
) -> None:
    text = conclude_on(make_model_folder(tmp_path), trials(19))
    assert "3 landmarks have a region of their own, 0.190 to 0.190 mm, of at least 19" in text
    assert "3 of 3 landmarks by their own masses" in text


def test_too_few_masses_leave_the_thresholds_as_they_are(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    made = [trial for trial in trials(10) if trial.kind != "half"]
    assert "too few masses, so none is changed (was 0.250 to 0.250)" in conclude_on(folder, made)
    assert {mark.presence_threshold for mark in read_manifest(folder).landmarks} == {0.25}


def test_too_few_errors_are_refused_with_what_they_could_promise(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    text = (folder / "model.toml").read_text()
    with pytest.raises(
        typer.BadParameter, match=r"at least 19 errors.*got 18.*promise 95 % at most"
    ):
        conclude_on(folder, trials(6))
    assert (folder / "model.toml").read_text() == text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model with a second network for one step on two specimens."""
    folder = tmp_path_factory.mktemp("trained")
    for seed, name in enumerate(("one", "two")):
        write_specimen(folder, name, seed)
    files = (folder / "scans", folder / "landmarks")
    landmarkd("train", *files, "-o", folder / "mine", *SMALL)
    landmarkd("refine", folder / "mine", *files, "--spacing", "1.0", *SMALL)
    return folder


def test_a_model_is_tried_on_the_scan_its_halves_and_blanks(trained: Path) -> None:
    model = load_checked(trained / "mine", torch.device("cpu"))
    pair = choose_pairs(trained / "scans", trained / "landmarks", ["one"])[0]
    made = try_scan(model, pair)
    assert [trial.kind for trial in made] == ["whole", *["half"] * 6, *["blank"] * 2]
    for trial in made:
        first, second = trial.networks
        assert [mark.landmark for mark in trial.answer] == list(NAMES)
        assert len(first) == len(NAMES)
        assert second == ()  # One step of training finds no pose to look again in.
        assert all(mark.present for mark in first) == (trial.kind == "whole")
    assert not any(mark.present for trial in made[-2:] for mark in trial.answer)


@pytest.mark.parametrize(("missing", "known"), [("unknown", False), ("absent", True)])
def test_what_a_file_does_not_place_is_absent_for_certain_only_from_blanks(
    trained: Path, tmp_path: Path, missing: Missing, known: bool
) -> None:
    model = load_checked(trained / "mine", torch.device("cpu"))
    name, scan, path = choose_pairs(trained / "scans", trained / "landmarks", ["one"])[0]
    part = tmp_path / "one.csv"
    part.write_text(path.read_text().rpartition("e,")[0])
    made = try_scan(model, (name, scan, part), missing)
    assert [trial.answer[-1].known for trial in made] == [*[known] * 7, True, True]


def test_the_command_refuses_a_model_that_finds_nothing(trained: Path) -> None:
    where = [trained / "mine", "--scans", trained / "scans", "--landmarks", trained / "landmarks"]
    before = (trained / "mine" / "model.toml").read_text()
    words = [*where, "--only", "two", "--device", "cpu"]
    result = CliRunner().invoke(app, ["calibrate", *map(str, words)])
    assert result.exit_code == 2, result.output
    assert "expected at least 19 errors" in result.stderr
    assert (trained / "mine" / "model.toml").read_text() == before


def test_the_command_names_scans_that_are_not_there(trained: Path) -> None:
    where = [trained / "mine", "--scans", trained / "scans", "--landmarks", trained / "landmarks"]
    result = CliRunner().invoke(app, ["calibrate", *map(str, [*where, "--only", "three"])])
    assert result.exit_code == 2
    assert "three" in result.stderr


def test_regions_are_written_where_the_answers_come_from(trained: Path) -> None:
    """To the second model, whose hash is brought up to date; thresholds to both."""
    regions = calibrate_regions([outcome(0.4321, scan=str(i)) for i in range(30)], NAMES)
    assert regions is not None
    first, second = [0.11] * len(NAMES), [0.22] * len(NAMES)
    write_calibration(trained / "mine", regions, [first, second])
    outer = read_manifest(trained / "mine").landmarks
    inner = read_manifest(trained / "mine" / "refine").landmarks
    assert {mark.presence_threshold for mark in outer} == {0.11}
    assert {mark.presence_threshold for mark in inner} == {0.22}
    assert {mark.region95_mm for mark in inner} == {0.433}
    assert load_checked(trained / "mine", torch.device("cpu")).manifest.name == "mine"
