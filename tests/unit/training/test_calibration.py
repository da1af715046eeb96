"""Regions and thresholds from held-out scans, as they are printed and written."""

import io
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from app.cli.main import app
from app.errors import BadParameter
from app.inference import Uncertainty
from app.inference.load import load_checked
from app.model import LoadedModel, editing, hash_file
from app.model.manifest import read_manifest
from app.training.calibrate import calibration_runs
from app.training.calibrate.calibration import (
    Calibration,
    calibrate_model,
    describe_coverage,
    load_fold_models,
    write_calibration,
)
from app.training.calibrate.calibration_runs import (
    CalibrationRun,
    CalibrationRuns,
    run_scan,
    run_scan_calibrated,
)
from app.training.calibrate.regions import Region, calibrate_regions
from app.training.calibrate.thresholds import Masses, Thresholds
from app.training.data.folds import Folds
from app.training.data.specimens import SpecimenFiles, pair_files
from app.training.evaluate.model_card import REGIONS, write_section
from app.training.options import Missing
from tests.support.killing import killed_at
from tests.support.model_folders import make_model_folder
from tests.support.outcomes import outcome
from tests.support.training_data import BLOBS, SMALL, landmarkd, write_specimens
from tests.unit.model.test_precision import verify_in


def make_runs(scans: int, landmarks: int = 3) -> list[CalibrationRun]:
    """Make runs of a model that finds all that is present, and answers little where nothing is."""
    runs = []
    for scan in range(scans):
        name = f"scan_{scan}"
        labels = [str(number) for number in range(1, landmarks + 1)]
        present = tuple(
            outcome(0.01 * (scan + 1), scan=name, landmark=label, mass=0.9) for label in labels
        )
        absent = tuple(
            outcome(scan=name, landmark=label, mass=0.1, present=False, status="not_found")
            for label in labels
        )
        runs += [
            CalibrationRun(name, "whole", (present,), present),
            CalibrationRun(name, "half", (absent,), absent),
            CalibrationRun(name, "blank", (absent,), absent),
        ]
    return runs


def calibrate(folder: Path, runs: Sequence[CalibrationRun]) -> str:
    """Calibrate a model with runs; returns the output."""
    text = io.StringIO()
    model = load_checked(folder, torch.device("cpu"))
    calibrate_model(folder, model, CalibrationRuns(runs, runs), Console(file=text, width=400))
    return text.getvalue()


def test_regions_and_thresholds_are_printed_and_written(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    text = calibrate(folder, make_runs(10))
    assert "0.300 to 0.300 (was 0.250 to 0.250), 0 of 3 landmarks by their own masses" in text
    assert "3 landmarks share one of 0.100 mm, of 30 errors of all landmarks" in text
    assert "about 96.8 % of further errors are expected within" in text
    assert "errors of one scan are alike, and these are of 10" in text
    assert "half 0 30 0.0 % 0.0 %" in " ".join(text.split())
    landmarks = read_manifest(folder).landmarks
    assert {landmark.presence_threshold for landmark in landmarks} == {0.3}
    assert {landmark.region95_mm for landmark in landmarks} == {0.1}
    voting = read_manifest(folder).voting
    assert voting.region_margin_mm == min(10.0, voting.radius_mm) > 0
    assert f"{voting.region_margin_mm:.3f} mm and more from the scan's border" in text
    assert load_checked(folder, torch.device("cpu")).manifest.name == "toy"


def test_a_card_does_not_describe_regions_that_were_replaced(tmp_path: Path) -> None:
    """Those of folds, by those of other scans."""
    folder = make_model_folder(tmp_path)
    write_section(folder, REGIONS, "errors of 3 models (cross-conformal)")
    calibrate(folder, make_runs(10))
    assert "cross-conformal" not in (folder / "README.md").read_text()


def test_landmarks_with_nineteen_scans_have_regions_of_their_own(tmp_path: Path) -> None:
    text = calibrate(make_model_folder(tmp_path), make_runs(19))
    assert "3 landmarks have a region of their own, 0.190 to 0.190 mm, of at least 19" in text
    assert "3 of 3 landmarks by their own masses" in text


def test_several_scans_of_a_subject_count_as_one() -> None:
    frames = [f"spine_{subject}-frame{number}" for subject in "ab" for number in range(10)]
    regions = {"1": Region(0.1, 20, 0.95, "landmark")}
    words = "about 95.0 % of further errors are expected within, over scans; errors of one subject"
    assert describe_coverage(regions, None, frames) == f"{words} are alike, and these are of 2"
    subjects = {name: name.partition("-")[0] for name in frames}
    folds = Folds(1, (tuple(frames[:10]), tuple(frames[10:])), subjects, {})
    assert "on 2 subjects" in describe_coverage(regions, folds, frames)


def test_thresholds_for_a_scan_are_chosen_on_those_of_other_subjects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skip(*_: object) -> list[CalibrationRun]:
        return []

    used: list[set[str]] = []

    def choose(_: LoadedModel, runs: Sequence[CalibrationRun]) -> list[Thresholds | None]:
        used.append({run.scan for run in runs})
        return [None]

    monkeypatch.setattr(calibration_runs, "run_scan", skip)
    monkeypatch.setattr(calibration_runs, "choose_thresholds", choose)
    model = load_checked(make_model_folder(tmp_path), torch.device("cpu"))
    runs = [CalibrationRun(name, "whole", (), ()) for name in ("a_left", "a_right", "b")]
    for some in (runs, runs[:2]):
        run_scan_calibrated(model, SpecimenFiles("a_left", tmp_path, tmp_path), some)
    assert used == [{"b"}, {"a_left", "a_right"}]
    # As folds know it, of whatever --subject has told when they were made.
    runs = [CalibrationRun(name, "whole", (), ()) for name in ("a-1", "a-2", "b")]
    files = SpecimenFiles("a-1", tmp_path, tmp_path)
    folds = Folds(1, (), {"a-1": "a", "a-2": "a", "b": "b"}, {})
    run_scan_calibrated(model, files, runs, "unknown", folds)
    assert used[-1] == {"b"}


def test_what_is_printed_of_folds_takes_their_subjects_for_such(tmp_path: Path) -> None:
    """Though the names of the scans do not tell that several show one."""
    folder = make_model_folder(tmp_path)
    runs = make_runs(12)
    names = [f"scan_{number}" for number in range(12)]
    folds = Folds(1, (tuple(names),), dict.fromkeys(names, "one"), {})
    text = io.StringIO()
    model = load_checked(folder, torch.device("cpu"))
    console = Console(file=text, width=400)
    calibrate_model(folder, model, CalibrationRuns(runs, runs), console, folds)
    assert "One subject: its thresholds were measured on itself." in text.getvalue()
    assert "errors within the regions of the other scans: too few scans" in text.getvalue()


def test_too_few_masses_leave_the_thresholds_as_they_are(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    runs = [run for run in make_runs(10) if run.kind != "half"]
    assert "too few masses, so none is changed (was 0.250 to 0.250)" in calibrate(folder, runs)
    landmarks = read_manifest(folder).landmarks
    assert {landmark.presence_threshold for landmark in landmarks} == {0.25}


def test_too_few_measurements_leave_their_intervals_as_they_are(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    manifest = folder / "model.toml"
    names = [landmark.name for landmark in read_manifest(folder).landmarks]
    manifest.write_text(
        manifest.read_text()
        + f'\n[[measurements]]\nname = "length"\nkind = "distance"\npoints = {names[:2]}\n'
        + "interval_scale = 0.7\n"
    )
    assert "intervals of measurements: too few" in calibrate(folder, make_runs(10))
    assert [one.interval_scale for one in read_manifest(folder).measurements] == [0.7]


def test_too_few_errors_are_refused_with_the_coverage_that_they_allow(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    text = (folder / "model.toml").read_text()
    message = r"at least 19 errors.*got 18.*allow 95 % at most"
    with pytest.raises(BadParameter, match=message):
        calibrate(folder, make_runs(6))
    assert (folder / "model.toml").read_text() == text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model with a second network for one step on two specimens."""
    folder = write_specimens(tmp_path_factory.mktemp("trained"), "one", "two")
    files = (folder / "scans", folder / "landmarks")
    landmarkd("train", *files, "-o", folder / "mine", *SMALL)
    landmarkd("refine", folder / "mine", *files, "--spacing", "1.0", *SMALL)
    return folder


@pytest.mark.no_cover
def test_a_model_is_run_on_the_scan_its_halves_and_blanks(trained: Path) -> None:
    model = load_checked(trained / "mine", torch.device("cpu"))
    (files,) = pair_files(trained / "scans", trained / "landmarks", ["one"])
    runs = run_scan(model, files)
    assert [run.kind for run in runs] == ["whole", *["half"] * 6, *["blank"] * 2]
    for run in runs:
        first, second = run.networks
        assert [one.landmark for one in run.answer] == list(BLOBS)
        assert len(first) == len(BLOBS)
        assert second == ()  # After one step of training, no pose is found.
        assert all(one.present for one in first) == (run.kind == "whole")
    assert not any(one.present for run in runs[-2:] for one in run.answer)


def test_second_networks_that_only_folds_have_so_far_answer_nothing(
    trained: Path, tmp_path: Path
) -> None:
    """Regions of what both networks answer are several times too small for the first alone."""
    folder, folds = tmp_path / "mine", Folds(1, (("one",), ("two",)), {}, {})
    for number, inner in enumerate((folder, folds.folder(folder, 1), folds.folder(folder, 2))):
        shutil.copytree(trained / "mine", inner)
        with editing(inner) as document:
            document["name"] = inner.name
            if number != 1:
                del document["refine"]
    models = load_fold_models(folder, folds, torch.device("cpu"))
    assert [models[name].manifest.name for name in ("one", "two")] == ["fold-1", "fold-2"]
    assert [models[name].refine for name in ("one", "two")] == [None, None]


def test_folds_calibrate_a_model_in_the_precision_that_it_is_served_in(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are verified in none, and had its regions be those of float32."""
    monkeypatch.setattr("app.model.registry.fast_precisions", lambda _device: ("bfloat16",))
    folder, folds = tmp_path / "mine", Folds(1, (("one",),), {}, {})
    for inner in (folder, folds.folder(folder, 1)):
        shutil.copytree(trained / "mine", inner)
        with editing(inner) as document:
            document["name"] = inner.name
    verify_in(folder, "bfloat16 = 0.01")
    asked = []

    def run_none(models: dict[str, LoadedModel], *_given: object) -> CalibrationRuns:
        asked.append(models["one"])
        raise BadParameter("none is run")

    calibration = "app.training.calibrate.calibration"
    monkeypatch.setattr(f"{calibration}.finished_folds", lambda *_given: folds)
    monkeypatch.setattr("app.training.calibrate.calibration_runs.run_all", run_none)
    files = ("--scans", trained / "scans", "--landmarks", trained / "landmarks")
    with pytest.raises(BadParameter, match="none is run"):
        landmarkd("calibrate", folder, *files, "--folds")
    networks = [network for model in asked for network in (model, model.refine) if network]
    assert [one.network.precision for one in networks] == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize(("missing", "known"), [("unknown", False), ("absent", True)])
def test_what_a_file_does_not_list_is_absent_for_certain_only_from_blanks(
    trained: Path, tmp_path: Path, missing: Missing, known: bool
) -> None:
    model = load_checked(trained / "mine", torch.device("cpu"))
    (files,) = pair_files(trained / "scans", trained / "landmarks", ["one"])
    part = tmp_path / "one.csv"
    part.write_text(files.landmarks.read_text().rpartition("e,")[0])
    runs = run_scan(model, files._replace(landmarks=part), missing)
    assert [run.answer[-1].known for run in runs] == [*[known] * 7, True, True]


def test_landmark_file_that_cannot_be_read_is_refused(trained: Path, tmp_path: Path) -> None:
    model = load_checked(trained / "mine", torch.device("cpu"))
    (files,) = pair_files(trained / "scans", trained / "landmarks", ["one"])
    broken = files._replace(landmarks=tmp_path / "one.csv")
    broken.landmarks.write_text("label,l,p,s\na,one,2,3\n")
    with pytest.raises(BadParameter, match=r"one\.csv cannot be read"):
        run_scan(model, broken)


@pytest.mark.parametrize(("outside", "refused"), [(slice(1), False), (slice(None), True)])
def test_a_scan_may_lack_some_landmarks_but_not_all(
    trained: Path, tmp_path: Path, outside: slice, refused: bool
) -> None:
    model = load_checked(trained / "mine", torch.device("cpu"))
    (files,) = pair_files(trained / "scans", trained / "landmarks", ["one"])
    head, *rows = files.landmarks.read_text().splitlines()
    rows[outside] = [row.replace(",", ",9", 1).replace("9-", "-9") for row in rows[outside]]
    other = files._replace(landmarks=tmp_path / "one.csv")
    other.landmarks.write_text("\n".join([head, *rows]))
    if refused:
        with pytest.raises(BadParameter, match=r"got 5 of 5 outside: do both files belong to one"):
            run_scan(model, other)
    else:
        assert [one.present for one in run_scan(model, other)[0].answer] == [False, *[True] * 4]


def test_the_command_refuses_a_model_that_finds_nothing(trained: Path) -> None:
    data = ["--scans", trained / "scans", "--landmarks", trained / "landmarks"]
    before = (trained / "mine" / "model.toml").read_text()
    words = [trained / "mine", *data, "--only", "two", "--device", "cpu"]
    result = CliRunner().invoke(app, ["calibrate", *map(str, words)])
    assert isinstance(result.exception, BadParameter)
    assert "expected at least 19 errors" in str(result.exception)
    assert (trained / "mine" / "model.toml").read_text() == before


def test_the_command_names_scans_that_are_not_there(trained: Path) -> None:
    data = ["--scans", trained / "scans", "--landmarks", trained / "landmarks"]
    words = [trained / "mine", *data, "--only", "three"]
    result = CliRunner().invoke(app, ["calibrate", *map(str, words)])
    assert result.exit_code == 2
    assert "three" in result.stderr


def test_regions_of_less_than_a_micrometre_are_written_as_they_are(trained: Path) -> None:
    """Of scans with voxels of 100 nm."""
    specs = read_manifest(trained / "mine").landmarks
    regions = calibrate_regions([outcome(4.321e-4, scan=str(i)) for i in range(30)], specs)
    assert regions is not None
    usual = Uncertainty(1.23e-4, 2.34e-4)
    calibration = Calibration(regions, [None, None], None, 7.654e-4, usual, "", folded=False)
    write_calibration(trained / "mine", calibration)
    written = read_manifest(trained / "mine" / "refine")
    assert {landmark.region95_mm for landmark in written.landmarks} == {4.33e-4}
    assert written.voting.region_margin_mm == 7.66e-4
    assert written.shape is not None
    assert written.shape.region_scale_mm == 1.23e-4
    assert written.voting.region_spread_mm == 2.34e-4
    assert "share one of 0.000432 mm" in calibration.summary()


def test_regions_are_written_where_the_answers_come_from(trained: Path) -> None:
    """To the second network, whose hash is updated; thresholds to both; [precision] stays."""
    with editing(trained / "mine") as document:
        document["precision"] = {"bfloat16": 0.01}
    specs = read_manifest(trained / "mine").landmarks
    regions = calibrate_regions([outcome(0.4321, scan=str(i)) for i in range(30)], specs)
    assert regions is not None
    masses = Masses(np.ones(3), np.zeros(3))
    first, second = (Thresholds((value,) * len(BLOBS), 0, masses) for value in (0.11, 0.22))
    write_calibration(
        trained / "mine",
        Calibration(
            regions, [first, second], 1.0, 0.7654, Uncertainty(0.123, None), "", folded=False
        ),
    )
    assert read_manifest(trained / "mine").voting.region_margin_mm == 0.0
    assert read_manifest(trained / "mine" / "refine").voting.region_margin_mm == 0.766
    shapes = [read_manifest(trained / name).shape for name in ("mine", "mine/refine")]
    assert [shape and shape.region_scale_mm for shape in shapes] == [None, 0.123]
    outer = read_manifest(trained / "mine").landmarks
    inner = read_manifest(trained / "mine" / "refine").landmarks
    assert {landmark.presence_threshold for landmark in outer} == {0.11}
    assert {landmark.presence_threshold for landmark in inner} == {0.22}
    assert {landmark.region95_mm for landmark in inner} == {0.433}
    loaded = load_checked(trained / "mine", torch.device("cpu")).manifest
    assert (loaded.name, loaded.precision.bfloat16) == ("mine", 0.01)


def test_killed_calibration_never_serves_new_thresholds_with_old_regions(
    trained: Path, tmp_path: Path
) -> None:
    """What is half written is refused, and its hashes put right by ``landmarkd check --write``."""
    specs = read_manifest(trained / "mine").landmarks
    regions = calibrate_regions([outcome(0.6, scan=str(i)) for i in range(30)], specs)
    assert regions is not None
    chosen = Thresholds((0.33,) * len(BLOBS), 0, Masses(np.ones(3), np.zeros(3)))
    usual = Uncertainty(None, None)
    calibration = Calibration(regions, [chosen, chosen], None, 0.7, usual, "", folded=False)
    states = set()
    for step in count():
        folder = Path(shutil.copytree(trained / "mine", tmp_path / str(step) / "mine"))
        is_killed = killed_at(step, partial(write_calibration, folder, calibration))
        new = [
            {one.presence_threshold for one in read_manifest(inner).landmarks} == {0.33}
            for inner in (folder, folder / "refine")
        ]
        promised = read_manifest(folder).refine
        assert promised is not None
        fits = promised.sha256 == hash_file(folder / "refine" / "model.toml")
        states.add((*new, fits))
        if not is_killed:
            break
    assert states == {(False, False, True), (False, True, False), (True, True, True)}
