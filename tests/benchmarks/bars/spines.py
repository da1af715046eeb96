"""A6 to A8: the shipped lumbar-mri model on subjects that none of its weights has seen."""

import time
from collections.abc import Callable, Iterator, Sequence
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
from app.shapes import fit_similarity, mean_shape
from app.training.evaluate.measured import compare_measurements
from app.training.evaluate.metrics import errors_mm, measure_coverage
from app.training.evaluate.outcomes import Outcome, compare
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.scans import real_scans
from tests.support.spines import (
    AMBIGUOUS,
    CONTRASTS,
    FIELDS,
    LORDOSIS,
    MODEL,
    UNSEEN,
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

ABSENT: Final = "real scans are not at hand"
GROUPS: Final = ("centre", "corner")


def a6_spines(run: Run) -> Iterator[Row]:
    """Errors on whole scans beside what guesses would make, and the time of a scan."""
    data = real_scans()
    if data is None:
        yield Row("mean error of centres, unseen spines", None, "mm", limit=CENTRE_MM, note=ABSENT)
        return
    outcomes = _outcomes(run, data, "")
    count = f"{len(_names(run))} unseen subjects"
    for group, limit in zip(GROUPS, (CENTRE_MM, CORNER_MM), strict=True):
        errors = errors_mm([one for one in outcomes if one.group == group])
        yield Row(f"mean error of {group}s, {count}", float(errors.mean()), "mm", limit=limit)
        high = float(np.percentile(errors, 95))
        yield Row(f"95th percentile of {group}s", high, "mm")
    unidentified = 100.0 - _identified(outcomes)
    yield Row("levels not identified", unidentified, "%", limit=UNIDENTIFIED_PERCENT)
    within, told = measure_coverage(outcomes)
    outside = 100 * (told - within) / max(told, 1)
    yield Row("errors outside of their region", outside, "%", limit=OUTSIDE_PERCENT)
    yield Row("errors within their region", 100 - outside, "%", limit=INSIDE_PERCENT)
    yield Row("time per scan, both networks", _seconds_per_scan(run, data), "s", limit=SCAN_S)
    yield from _yardsticks(run, data)


def a7_other_scans(run: Run) -> Iterator[Row]:
    """The same subjects in other contrasts, and as others would scan them."""
    data = real_scans()
    if data is None:
        limit = OTHER_UNIDENTIFIED_PERCENT
        yield Row("levels not identified, other contrasts", None, "%", limit=limit, note=ABSENT)
        return
    for kind in (*CONTRASTS, *FIELDS, *AMBIGUOUS)[:: 5 if run.fast else 1]:
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


def a8_lordosis(run: Run) -> Iterator[Row]:
    """The angle of lordosis, and its interval."""
    data = real_scans()
    if data is None:
        yield Row("mean error of the lordosis", None, "deg", limit=LORDOSIS_DEG, note=ABSENT)
        return
    specs = _detector().model.manifest.measurements
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
    names = [landmark.name for landmark in _detector().model.manifest.landmarks]
    everyone = sorted(
        path.name.removesuffix(".nii.gz") for path in (data / "lumbar-mri" / "scans").iterdir()
    )
    truth = {name: _truth(data, name, names) for name in everyone}
    others = [truth[name] for name in everyone if name not in UNSEEN]
    centre = np.array([" " not in name for name in names])
    constant = np.mean(others, axis=0)
    mean = mean_shape(others)
    guesses: dict[str, Callable[[Points], Points]] = {
        "constant predictor": lambda _: constant,
        "mean shape fitted to the truth": lambda true: _fitted(mean, true),
        "best other subject fitted to the truth": lambda true: min(
            (_fitted(other, true) for other in others),
            key=lambda guess: float(np.linalg.norm(guess - true, axis=1).mean()),
        ),
    }
    for what, guess in guesses.items():
        errors = [np.linalg.norm(guess(truth[one]) - truth[one], axis=1) for one in _names(run)]
        figures = np.array(errors)
        yield Row(f"{what}: centres", float(figures[:, centre].mean()), "mm")
        yield Row(f"{what}: corners", float(figures[:, ~centre].mean()), "mm")
    alone = Detector(replace(_detector().model, refine=None))
    outcomes = [mark for name in _names(run) for mark in _compare(alone, data, name, "")]
    for group in GROUPS:
        errors_alone = errors_mm([one for one in outcomes if one.group == group])
        yield Row(f"first network alone: {group}s", float(errors_alone.mean()), "mm")


@cache
def _detector() -> Detector:
    return Detector(load_checked(MODEL, choose_device("auto"), "auto"))


def _names(run: Run) -> Sequence[str]:
    return UNSEEN[:1] if run.fast else UNSEEN


def _truth(data: Path, name: str, landmarks: Sequence[str]) -> Points:
    points = read_landmarks(spine_files(data, name).landmarks)
    return np.stack([points[landmark] for landmark in landmarks])


def _fitted(shape: Points, true: Points) -> Points:
    fit = fit_similarity(shape, true, np.ones(len(true)))
    return np.asarray(fit.apply(shape))


def _changed(data: Path, name: str, kind: str) -> Volume:
    volume = read_spine(data, name)
    return {**CONTRASTS, **FIELDS, **AMBIGUOUS}[kind](volume) if kind else volume


def _compare(detector: Detector, data: Path, name: str, kind: str) -> tuple[Outcome, ...]:
    volume = _changed(data, name, kind)
    truth = read_landmarks(spine_files(data, name).landmarks)
    groups = {spec.name: spec.group for spec in detector.model.manifest.landmarks}
    return compare(name, volume, truth, detector.detect(volume).landmarks, groups=groups)


@cache
def _answers(data: Path, name: str, kind: str) -> tuple[Outcome, ...]:
    return _compare(_detector(), data, name, kind)


def _outcomes(run: Run, data: Path, kind: str) -> list[Outcome]:
    return [mark for name in _names(run) for mark in _answers(data, name, kind)]


def _centres(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.group == "centre"]


def _identified(outcomes: Sequence[Outcome]) -> float:
    present = [one for one in _centres(outcomes) if one.present]
    return 100 * float(np.mean([one.identified for one in present]))


def _seconds_per_scan(run: Run, data: Path) -> float:
    """Time scans from bytes in memory to landmarks; gives the median."""
    spent = []
    for _ in range(run.rounds):
        for name in _names(run):
            volume = read_spine(data, name)
            start = time.perf_counter()
            _detector().detect(volume)
            spent.append(time.perf_counter() - start)
    return float(np.median(spent))
