"""``--folds`` of ``landmarkd train`` and ``calibrate``: what is reported, of models that find."""

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from app.cli.main import app
from app.errors import BadParameter
from app.inference.load import load_checked
from app.model.manifest import read_manifest
from app.phantom import write_phantoms
from app.training.data.folds import Folds, read_folds
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.crossvalidation import (
    PooledOutcomes,
    report_pooled,
    write_card_section,
)
from app.training.evaluate.outcomes import read_outcomes
from app.training.record import read_record
from tests.support.outcomes import outcome
from tests.support.training_data import landmarkd, read_csv

PHANTOM = Path(__file__).resolve().parents[3] / "models" / "phantom"
LIKE_PHANTOM = (
    "--spacing", 2, "--radius", 8, "--tile", 48, "--filters", "16,32,64", "--batch", 1,
    "--missing", "absent", "--intensity", "percentile:0.02,99.99", "--device", "cpu",
)  # fmt: skip


SEEDS = (5007, 5031, 5035, 5038, 5039)
"""Of phantoms of two tiles; most have eight."""
FIRST = f"phantom-{SEEDS[0]}"


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cross-validate a model that finds most, by starting from one that does."""
    data = tmp_path_factory.mktemp("phantoms")
    for seed in SEEDS:
        write_phantoms(data, count=1, seed=seed)
    words = (*LIKE_PHANTOM, "--steps", 1, "--rate", 1e-6, "--start", PHANTOM, "--folds", 2)
    output = landmarkd("train", data / "scans", data / "landmarks", "-o", data / "mine", *words)
    (data / "output").write_text(output)
    return data


@pytest.mark.no_cover
def test_metrics_are_those_of_evaluate_on_each_fold_pooled(phantoms: Path, tmp_path: Path) -> None:
    model = phantoms / "mine"
    folds = read_folds(model)
    assert folds is not None
    rows: list[dict[str, str]] = []
    for number, names in enumerate(folds.members, start=1):
        out = tmp_path / str(number)
        only = [word for name in names for word in ("--only", name)]
        landmarkd(
            "evaluate", folds.folder(model, number), "--scans", phantoms / "scans",
            "--landmarks", phantoms / "landmarks", "--missing", "absent", "--device", "cpu",
            *only, "-o", out,
        )  # fmt: skip
        rows += [row | {"fold": str(number)} for row in read_csv(out / "errors.csv")]
        (alone,) = (row for row in read_csv(out / "summary.csv") if row["of"] == "all")
        (mine,) = (
            row
            for row in read_csv(model / "folds" / "summary.csv")
            if (row["of"], row["name"]) == ("fold", str(number))
        )
        assert {**mine, "of": "", "name": ""} == {**alone, "of": "", "name": ""}
    assert read_csv(model / "folds" / "errors.csv") == rows
    errors = np.array([float(row["error_mm"]) for row in rows if row["error_mm"]])
    assert len(errors) > 15
    assert errors.mean() < 2
    whole = read_csv(model / "folds" / "summary.csv")[0]
    assert float(whole["mean_mm"]) == pytest.approx(errors.mean(), abs=1e-3)
    assert float(whole["p95_mm"]) == pytest.approx(np.percentile(errors, 95), abs=2e-3)
    assert int(whole["present"]) + int(whole["absent"]) == len(rows) == 30
    by_scan = [
        np.mean([float(row["error_mm"]) for row in rows if row["scan"] == scan and row["error_mm"]])
        for scan in folds.subjects
    ]
    page = (model / "folds" / "report.html").read_text()
    assert "Mean of 5 subjects" in page
    (deviation,) = re.findall(r"standard deviation (\S+) mm over subjects", page)
    assert float(deviation) == pytest.approx(np.std(by_scan, ddof=1), abs=6e-4)


def test_the_model_is_trained_on_all_scans_and_its_card_explains_its_metrics(
    phantoms: Path,
) -> None:
    model = phantoms / "mine"
    record = read_record(model)
    assert len(record["train"]) == 5
    assert record["held_out"] == []
    card = (model / "README.md").read_text()
    assert "not of the model that is served but of 2 models of one network" in card
    assert "each on about 1/2 of the 5 scans" in card
    mean = read_csv(model / "folds" / "summary.csv")[0]["mean_mm"]
    assert f"| all | {mean} |" in card
    page = (model / "folds" / "report.html").read_text()
    assert "mine, cross-validation" in page
    assert "<td>2</td>" in page
    assert load_checked(model, torch.device("cpu")).manifest.name == "mine"
    output = " ".join((phantoms / "output").read_text().split())
    assert "nothing says what" in output  # the model whose weights it started from has seen


@pytest.mark.no_cover
def test_regions_can_be_taken_from_all_folds_together(phantoms: Path, tmp_path: Path) -> None:
    """The errors of two phantoms would be too few."""
    model = tmp_path / "mine"
    shutil.copytree(phantoms / "mine", model)
    where = ("--scans", phantoms / "scans", "--landmarks", phantoms / "landmarks")
    output = landmarkd("calibrate", model, *where, "--folds", "--missing", "absent")
    folds = read_folds(model)
    assert folds is not None
    kept = [
        landmark.error_mm
        for number in (1, 2)
        for landmark in (read_outcomes(folds.folder(model, number)) or pytest.fail("none")).outcomes
        if landmark.status == "detected" and np.isfinite(landmark.error_mm)
    ]
    assert 19 <= len(kept) <= 30
    (radius,) = {landmark.region95_mm for landmark in read_manifest(model).landmarks}
    assert radius is not None
    # With other thresholds a few more or fewer may be detected.
    assert radius == pytest.approx(max(kept), abs=1)
    for text in (output, (model / "README.md").read_text()):
        words = " ".join(text.split())
        assert (
            "errors of 2 models on 5 scans that they were not trained on (cross-conformal)" in words
        )


@pytest.mark.parametrize("more", [[], ["--only", FIRST, "--folds"]])
def test_calibration_is_by_held_out_scans_or_by_folds(phantoms: Path, more: list[str]) -> None:
    where = ["--scans", phantoms / "scans", "--landmarks", phantoms / "landmarks"]
    words = ["calibrate", phantoms / "mine", *where, *more]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2
    assert "expected either --only NAME" in result.output


def test_a_model_without_folds_cannot_be_calibrated_by_them(phantoms: Path) -> None:
    where = ("--scans", phantoms / "scans", "--landmarks", phantoms / "landmarks")
    with pytest.raises(BadParameter, match="expected a model that was trained with --folds"):
        landmarkd("calibrate", PHANTOM, *where, "--folds")


def test_failures_and_unknown_landmarks_are_reported_everywhere(tmp_path: Path) -> None:
    folds = Folds(1, (("a",), ("b", "c")), {name: name for name in "abc"}, dict.fromkeys("abc", ""))
    some = [outcome(0.25, scan="a"), outcome(0.75, scan="b")]
    some.append(outcome(scan="b", landmark="b", present=False, known=False))
    pooled = PooledOutcomes(
        tmp_path / "mine", folds, tuple(some), ("c: too large",), is_refine=True
    )
    specimens = [
        SpecimenFiles(name, tmp_path / "gone.nii", tmp_path / "gone.csv") for name in "abc"
    ]
    text = io.StringIO()
    report_pooled(pooled, specimens, Console(file=text, width=300))
    write_card_section(pooled)
    page = (tmp_path / "mine" / "folds" / "refine" / "report.html").read_text()
    card = (tmp_path / "mine" / "README.md").read_text()
    for words in (text.getvalue(), page, card):
        assert "c: too large" in words
        assert "Landmarks without a position in their files: 1." in words
        assert "0.500 mm" in words
    assert "of 2 pairs of networks" in card
    assert "| fold 2 | 0.750 |" in card
