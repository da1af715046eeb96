"""Regions and card of the mouse-skull model agree with the errors of its cross-validation."""

import csv
import re
from collections import defaultdict

import numpy as np
import pytest

from app.model.manifest import read_manifest
from app.training.calibrate.regions import conformal_region
from tests.support.skulls import MODEL


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str]]:
    with (MODEL / "crossvalidation" / "errors.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_regions_are_those_of_skulls_that_were_held_out(errors: list[dict[str, str]]) -> None:
    mine: dict[str, list[float]] = defaultdict(list)
    for row in errors:
        if row["status"] == "detected":
            mine[row["landmark"]].append(float(row["error_mm"]) / float(row["growth"]))
    landmarks = read_manifest(MODEL / "refine").landmarks
    assert len(landmarks) == len(mine) == 45
    for landmark in landmarks:
        region = conformal_region(np.array(mine[landmark.name]), "landmark")
        assert region is not None
        assert region.coverage >= 0.95
        assert landmark.region95_mm == pytest.approx(region.radius_mm, abs=0.001)


def test_the_card_says_what_regions_that_grow_are_worth(errors: list[dict[str, str]]) -> None:
    """Narrower for skulls that are like others, yet wider on average than regions alike for all."""
    growths = {row["scan"]: float(row["growth"]) for row in errors}
    shipped = {one.name: one.region95_mm for one in read_manifest(MODEL / "refine").landmarks}
    mine: dict[str, list[float]] = defaultdict(list)
    for row in errors:
        mine[row["landmark"]].append(float(row["error_mm"]))
    alike = {name: conformal_region(np.array(mm), "landmark") for name, mm in mine.items()}
    wide = [(one.radius_mm, shipped[name] or 0.0) for name, one in alike.items() if one is not None]
    wider = np.mean([radius / own for radius, own in wide]) - 1
    on_average, grown = np.mean(wide, axis=0) * (1, np.mean(list(growths.values())))
    card = " ".join((MODEL / "README.md").read_text().split())
    assert min(growths.values()) == 1.0
    assert (
        f"would be {100 * wider:.0f} % wider for those that are like others and sharp, "
        f"{100 * (1 - on_average / grown):.0f} % narrower on average over the {len(growths)}"
    ) in card


def test_the_card_lists_the_errors_of_every_fold(errors: list[dict[str, str]]) -> None:
    card = (MODEL / "README.md").read_text()
    section = card.split("## Error on skulls")[1].split("## Strains")[0]
    cells = [
        re.findall(r"[\d.,]+", line.replace("*", "").split("|", 2)[2])
        for line in section.splitlines()
        if line.startswith(("| without", "| all"))
    ]
    folds = [[row for row in errors if row["fold"] == fold] for fold in "12345"]
    for line, rows in zip(cells, [*folds, errors], strict=True):
        mm = np.array([float(row["error_mm"]) for row in rows if row["error_mm"]])
        expected = mm.mean(), np.median(mm), np.percentile(mm, 95), mm.max()
        detected = sum(row["status"] == "detected" for row in rows)
        metrics = [float(number.replace(",", "")) for number in line]
        # Errors are rounded in the file, and metrics in the card.
        assert metrics == pytest.approx([*expected, detected, len(rows)], abs=1e-3)
