"""A1: how near the phantom model comes, on phantoms that it never saw."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from app.compute.device import choose_device
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import read_volume
from app.phantom import make_phantom, scan_bytes
from app.training.evaluate.metrics import errors_mm, measure_presence
from app.training.evaluate.outcomes import Outcome, compare
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.scans import PHANTOM

FIRST: Final = 5000
COUNT: Final = 100
"""Seeds of the phantoms; none was trained on."""

MEAN: Final = 0.15
PRESENCE_PERCENT: Final = 1.0


def a1_phantoms(run: Run) -> Iterator[Row]:
    """Errors in voxels of the model's grid, and the share of wrong presences."""
    count = 2 if run.fast else COUNT
    detector = Detector(load_checked(PHANTOM, choose_device("auto"), "auto"))
    (spacing,) = set(detector.model.manifest.input.spacing_mm)
    outcomes = [mark for seed in range(FIRST, FIRST + count) for mark in _detect(detector, seed)]
    voxels = errors_mm(outcomes) / spacing
    there = measure_presence(outcomes)
    wrong = 100 * (there.missed + there.invented) / len(outcomes)
    what = f"{count} phantoms, random oblique poses and spacings"
    unit = "grid voxel"
    yield Row(f"mean error, {what}", float(voxels.mean()), unit, limit=Limit(MEAN, "figure"))
    yield Row(f"95th percentile, {what}", float(np.percentile(voxels, 95)), unit)
    yield Row(f"largest, {what}", float(voxels.max()), unit)
    note = f"{there.missed} of {there.present} missed, {there.invented} of {there.absent} invented"
    limit = Limit(PRESENCE_PERCENT, "figure")
    yield Row(f"presence errors, {what}", wrong, "%", limit=limit, note=note)


def _detect(detector: Detector, seed: int) -> tuple[Outcome, ...]:
    """Answer the file of a phantom."""
    phantom = make_phantom(seed)
    volume = read_volume(scan_bytes(phantom))
    places = zip(phantom.names, phantom.points, strict=True)
    truth = {name: point for name, point in places if np.isfinite(point).all()}
    found = detector.detect(volume).landmarks
    return compare(str(seed), volume, truth, found, missing="absent")
