"""A6 to A8: the lumbar-mri model.

Its weights have learned from every subject at hand. Errors are those of the models of its
cross-validation, each on the subjects that it has not seen, with all that the shipped manifest says
besides, if ``LANDMARKD_LUMBAR_FOLDS`` names the folder of a model that was trained with folds.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from app.compute.device import choose_device
from app.geometry import Points
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io import Volume, read_landmarks
from app.model import LoadedModel, load_shape
from app.shapes import fit_similarity, mean_shape
from app.training.calibrate.regions import leave_one_out
from app.training.data.folds import read_folds
from app.training.evaluate.measured import compare_measurements
from app.training.evaluate.metrics import errors_mm
from app.training.evaluate.outcomes import Outcome, compare
from app.training.files import REFINE
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.scans import real_scans
from tests.support.spines import (
    AMBIGUOUS,
    CONTRASTS,
    FIELDS,
    LORDOSIS,
    MODEL,
    SUBJECTS,
    WORSE,
    read_spine,
    spine_files,
)

CENTRE_MM: Final = Limit(1.2, "figure")
CORNER_MM: Final = Limit(2.0, "figure")
UNIDENTIFIED_PERCENT: Final = Limit(2.0, "figure")
OUTSIDE_PERCENT: Final = Limit(8.0, "figure")
INSIDE_PERCENT: Final = Limit(98.0, "figure")
SCAN_S: Final = Limit(2.5, "figure")
OTHER_UNIDENTIFIED_PERCENT: Final = Limit(15.0, "figure")
WRONG_PERCENT: Final = Limit(5.0, "figure")
LORDOSIS_DEG: Final = Limit(3.0, "figure")
INTERVAL_OUTSIDE_PERCENT: Final = Limit(10.0, "figure")

FOLDS: Final = "LANDMARKD_LUMBAR_FOLDS"
ABSENT: Final = f"real scans are not at hand, or {FOLDS} names no model with folds"
GROUPS: Final = ("centre", "corner")
GIVEN: Final = ("surroundings", "region_scale_mm", "max_stretch", "max_twist_deg", "min_extent_mm")
"""What the shipped manifest says of the shape besides what training writes."""
SETTLED: Final = ("region_margin_mm", "region_spread_mm")
"""And of voting."""


def a6_spines(run: Run) -> Iterator[Row]:
    """Errors on whole scans beside what guesses would make, and the time of a scan."""
    data = real_scans()
    if data is not None:
        yield Row("time per scan, both networks", _seconds_per_scan(run, data), "s", limit=SCAN_S)
    if data is None or not _detectors(run.fast):
        yield Row("mean error of centres, unseen spines", None, "mm", limit=CENTRE_MM, note=ABSENT)
        return
    outcomes = _outcomes(run, data, "")
    count = f"{len(_detectors(run.fast))} unseen subjects"
    for group, limit in zip(GROUPS, (CENTRE_MM, CORNER_MM), strict=True):
        errors = errors_mm([one for one in outcomes if one.group == group])
        yield Row(f"mean error of {group}s, {count}", float(errors.mean()), "mm", limit=limit)
        high = float(np.percentile(errors, 95))
        yield Row(f"95th percentile of {group}s", high, "mm")
    unidentified = 100.0 - _identified(outcomes)
    yield Row("levels not identified", unidentified, "%", limit=UNIDENTIFIED_PERCENT)
    shares = leave_one_out(outcomes, _shipped().model.manifest.landmarks)
    if shares:
        inside = 100 * float(np.mean(list(shares.values())))
        what, note = "of their region, from all other subjects", f"{len(shares)} subjects"
        yield Row(f"errors outside {what}", 100 - inside, "%", limit=OUTSIDE_PERCENT, note=note)
        yield Row(f"errors inside {what}", inside, "%", limit=INSIDE_PERCENT, note=note)
    yield from _yardsticks(run, data)


def a7_other_scans(run: Run) -> Iterator[Row]:
    """The same subjects in other contrasts, and as others would scan them."""
    data = real_scans()
    if data is None or not _detectors(run.fast):
        limit = OTHER_UNIDENTIFIED_PERCENT
        yield Row("levels not identified, other contrasts", None, "%", limit=limit, note=ABSENT)
        return
    for kind in (*CONTRASTS, *FIELDS, *WORSE, *AMBIGUOUS)[:: 6 if run.fast else 1]:
        outcomes = _outcomes(run, data, kind)
        errors = errors_mm([one for one in outcomes if one.group == "centre"])
        yield Row(f"mean error of centres: {kind}", float(errors.mean()), "mm")
        missed = 100.0 - _identified(outcomes)
        limit = Limit(None, "figure") if kind in AMBIGUOUS else OTHER_UNIDENTIFIED_PERCENT
        yield Row(f"levels not identified: {kind}", missed, "%", limit=limit)
        present = [one for one in _centres(outcomes) if one.present]
        detected = [one for one in present if one.status == "detected"]
        yield Row(f"levels detected: {kind}", 100 * len(detected) / len(present), "%")
        wrong = 100 * float(np.mean([not one.identified for one in detected] or [False]))
        yield Row(f"of those detected, a wrong level: {kind}", wrong, "%", limit=WRONG_PERCENT)
        outside = [one.error_mm > one.region95_mm for one in outcomes if one.region95_mm]
        share = 100 * float(np.mean(outside)) if outside else None
        note = f"{len(outside)} landmarks of both kinds"
        yield Row(f"of those with a region, outside of it: {kind}", share, "%", note=note)


def a8_lordosis(run: Run) -> Iterator[Row]:
    """The angle of lordosis, and its interval."""
    data = real_scans()
    if data is None or not _detectors(run.fast):
        yield Row("mean error of the lordosis", None, "deg", limit=LORDOSIS_DEG, note=ABSENT)
        return
    specs = _shipped().model.manifest.measurements
    deviations = compare_measurements(specs, _outcomes(run, data, ""))
    errors = [one.error for one in deviations if one.spec.name == LORDOSIS]
    yield Row("mean error of the lordosis", float(np.mean(errors)), "deg", limit=LORDOSIS_DEG)
    for name, some in (
        ("lordosis", [one for one in deviations if one.spec.name == LORDOSIS]),
        ("all measurements", deviations),
    ):
        held = [one.error <= one.half_width for one in some if one.half_width is not None]
        outside = 100 * (1 - float(np.mean(held)))
        note = f"{len(held)} intervals"
        limit = INTERVAL_OUTSIDE_PERCENT
        yield Row(f"truth outside of the interval: {name}", outside, "%", limit=limit, note=note)


def _yardsticks(run: Run, data: Path) -> Iterator[Row]:
    """What is reached without looking at the scan, or with the first network alone."""
    names = [landmark.name for landmark in _shipped().model.manifest.landmarks]
    everyone = sorted(
        path.name.removesuffix(".nii.gz") for path in (data / "lumbar-mri" / "scans").iterdir()
    )
    truth = {name: _truth(data, name, names) for name in everyone}
    centre = np.array([" " not in name for name in names])
    guesses: dict[str, Callable[[Points, Sequence[Points]], Points]] = {
        "constant predictor": lambda _, others: np.mean(others, axis=0),
        "mean shape fitted to the truth": lambda true, others: _fitted(mean_shape(others), true),
        "best other subject fitted to the truth": lambda true, others: min(
            (_fitted(other, true) for other in others),
            key=lambda guess: float(np.linalg.norm(guess - true, axis=1).mean()),
        ),
    }
    subjects = _detectors(run.fast)
    for what, guess in guesses.items():
        errors = []
        for one in subjects:
            others = [truth[name] for name in everyone if name != one]
            errors.append(np.linalg.norm(guess(truth[one], others) - truth[one], axis=1))
        figures = np.array(errors)
        yield Row(f"{what}: centres", float(figures[:, centre].mean()), "mm")
        yield Row(f"{what}: corners", float(figures[:, ~centre].mean()), "mm")
    outcomes = [
        mark
        for name, detector in subjects.items()
        for mark in _compare(Detector(replace(detector.model, refine=None)), data, name, "")
    ]
    for group in GROUPS:
        errors_alone = errors_mm([one for one in outcomes if one.group == group])
        yield Row(f"first network alone: {group}s", float(errors_alone.mean()), "mm")


@cache
def _shipped() -> Detector:
    return Detector(load_checked(MODEL, choose_device("auto"), "auto"))


@cache
def _detectors(fast: bool) -> Mapping[str, Detector]:
    """Return the model of each subject's fold; of one subject, the shipped one in a fast run."""
    if fast:
        return {SUBJECTS[0]: _shipped()}
    folder = Path(os.environ.get(FOLDS, ""))
    folds = read_folds(folder)
    if folds is None:
        return {}
    detectors: dict[str, Detector] = {}
    for number, names in enumerate(folds.members, start=1):
        fold = folds.folder(folder, number)
        model = load_checked(fold, choose_device("auto"), "auto")
        detectors |= dict.fromkeys(names, Detector(_like_shipped(model, fold, _shipped().model)))
    return detectors


def _like_shipped(model: LoadedModel, folder: Path, shipped: LoadedModel) -> LoadedModel:
    """Give a model of a folder what people, or a calibration, wrote into the shipped manifest."""
    changes: dict[str, object] = {
        "landmarks": shipped.manifest.landmarks,
        "measurements": shipped.manifest.measurements,
        "voting": model.manifest.voting.model_copy(
            update={name: getattr(shipped.manifest.voting, name) for name in SETTLED}
        ),
    }
    if model.manifest.shape is not None and shipped.manifest.shape is not None:
        shape = shipped.manifest.shape
        given = {name: getattr(shape, name) for name in GIVEN}
        changes["shape"] = model.manifest.shape.model_copy(update=given)
    refine = model.refine
    if refine is not None and shipped.refine is not None:
        refine = _like_shipped(refine, folder / REFINE, shipped.refine)
    manifest = model.manifest.model_copy(update=changes)
    return replace(model, manifest=manifest, shape=load_shape(folder, manifest), refine=refine)


def _truth(data: Path, name: str, landmarks: Sequence[str]) -> Points:
    points = read_landmarks(spine_files(data, name).landmarks)
    return np.stack([points[landmark] for landmark in landmarks])


def _fitted(shape: Points, true: Points) -> Points:
    fit = fit_similarity(shape, true, np.ones(len(true)))
    return np.asarray(fit.apply(shape))


def _changed(data: Path, name: str, kind: str) -> Volume:
    volume = read_spine(data, name)
    return {**CONTRASTS, **FIELDS, **WORSE, **AMBIGUOUS}[kind](volume) if kind else volume


def _compare(detector: Detector, data: Path, name: str, kind: str) -> tuple[Outcome, ...]:
    volume = _changed(data, name, kind)
    truth = read_landmarks(spine_files(data, name).landmarks)
    groups = {spec.name: spec.group for spec in detector.model.manifest.landmarks}
    return compare(name, volume, truth, detector.detect(volume).landmarks, groups=groups)


@cache
def _outcomes(run: Run, data: Path, kind: str) -> list[Outcome]:
    return [
        mark
        for name, detector in _detectors(run.fast).items()
        for mark in _compare(detector, data, name, kind)
    ]


def _centres(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.group == "centre"]


def _identified(outcomes: Sequence[Outcome]) -> float:
    present = [one for one in _centres(outcomes) if one.present]
    return 100 * float(np.mean([one.identified for one in present]))


def _seconds_per_scan(run: Run, data: Path) -> float:
    """Time scans from bytes in memory to landmarks; gives the median."""
    spent = []
    for _ in range(run.rounds):
        for name in SUBJECTS[: 1 if run.fast else None]:
            volume = read_spine(data, name)
            start = time.perf_counter()
            _shipped().detect(volume)
            spent.append(time.perf_counter() - start)
    return float(np.median(spent))
