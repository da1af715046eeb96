"""A2 to A5: the shipped mouse-skull model on specimens that none of its weights has seen."""

import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

import numpy as np

from app.compute.device import choose_device
from app.geometry import transform
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.training.calibrate.calibration_runs import CalibrationRun, run_scan
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.metrics import errors_mm, group, measure_coverage, measure_presence
from app.training.evaluate.outcomes import Outcome, compare
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.scans import real_scans
from tests.support.skulls import (
    BRAINS,
    MODEL,
    UNSEEN,
    find,
    landmarks_path,
    read_brain,
    read_skull,
    scan_path,
    stored_in_all_orders,
    turn,
)

MEAN_MM: Final = Limit(0.19, "figure")
P95_MM: Final = Limit(0.45, "figure")
SCAN_S: Final = Limit(3.0, "figure")
ORDERS_MM: Final = Limit(0.02, "figure")
TURNED_MM: Final = Limit(0.15, "figure")
OUTSIDE_PERCENT: Final = Limit(7.0, "figure")
INSIDE_PERCENT: Final = Limit(97.0, "figure")
INVENTED_PERCENT: Final = Limit(3.0, "figure")
LOST_PERCENT: Final = Limit(3.0, "figure")

ABSENT: Final = "real scans are not at hand"


def a2_skulls(run: Run) -> Iterator[Row]:
    """Errors on whole skulls, and the time of one on this device."""
    if real_scans() is None:
        yield Row("mean error on unseen skulls", None, "mm", limit=MEAN_MM, note=ABSENT)
        return
    errors = errors_mm(_outcomes(run, "whole"))
    what = f"{len(errors)} landmarks of unseen skulls, any pose"
    yield Row(f"mean error, {what}", float(errors.mean()), "mm", limit=MEAN_MM)
    yield Row(f"95th percentile, {what}", float(np.percentile(errors, 95)), "mm", limit=P95_MM)
    yield Row(f"median, {what}", float(np.median(errors)), "mm")
    yield Row(f"largest, {what}", float(errors.max()), "mm")
    for scan in _names(run):
        mine = errors_mm([mark for mark in _outcomes(run, "whole") if mark.scan == scan])
        yield Row(f"mean error, {scan}", float(mine.mean()), "mm")
    yield Row("time per scan, both networks", _seconds_per_scan(run), "s", limit=SCAN_S)


def a3_poses(run: Run) -> Iterator[Row]:
    """How far landmarks move that should stay, in all axis orders, or turn with the subject."""
    data = real_scans()
    if data is None:
        yield Row(
            "landmarks of a scan in all axis orders", None, "mm", limit=ORDERS_MM, note=ABSENT
        )
        return
    volume = read_skull(data, _names(run)[-1])
    expected, _ = find(_detector(), volume)
    orders = list(stored_in_all_orders(volume))[:: 16 if run.fast else 1]
    apart = [np.linalg.norm(find(_detector(), order)[0] - expected, axis=1) for order in orders]
    what = f"farthest that a landmark moves in {len(orders)} axis orders"
    # A landmark that one order does not find is NaN, and so is the figure: no bar is met then.
    yield Row(what, float(np.max(apart)), "mm", limit=ORDERS_MM)
    moved, lost = [], 0
    for seed, name in enumerate(_names(run)):
        volume = read_skull(data, name)
        turned, motion = turn(volume, seed)
        there, found = find(_detector(), volume)[0], find(_detector(), turned)[0]
        off = np.linalg.norm(found - transform(motion, there), axis=1)
        moved.append(off[np.isfinite(off)])
        lost += int(np.isnan(off).sum())
    what = f"mean distance from where the subject turns, {len(moved)} skulls"
    note = f"{lost} landmarks not found"
    yield Row(what, float(np.concatenate(moved).mean()), "mm", limit=TURNED_MM, note=note)


def a4_regions(run: Run) -> Iterator[Row]:
    """How many errors lie within the regions that are told, which come from other specimens."""
    if real_scans() is None:
        note = ABSENT
        yield Row("errors outside of their region", None, "%", limit=OUTSIDE_PERCENT, note=note)
        return
    within, told = measure_coverage(_outcomes(run, "whole"))
    by_scan = group(_outcomes(run, "whole"), lambda mark: mark.scan).values()
    shares = [100 * inside / all_of for inside, all_of in map(measure_coverage, by_scan)]
    note = "by specimen: " + ", ".join(f"{share:.0f} %" for share in shares)
    outside = 100 * (told - within) / told
    yield Row("errors outside of their region", outside, "%", limit=OUTSIDE_PERCENT, note=note)
    yield Row("errors within their region", 100 - outside, "%", limit=INSIDE_PERCENT)


def a5_presence(run: Run) -> Iterator[Row]:
    """Landmarks of half skulls, of nothing, of noise and of brains."""
    data = real_scans()
    if data is None:
        yield Row("absent, but detected", None, "%", limit=INVENTED_PERCENT, note=ABSENT)
        return
    marks = _detector().model.manifest.landmarks
    brains: list[Outcome] = []
    for name in BRAINS[: 1 if run.fast else len(BRAINS)]:
        volume = read_brain(data, name)
        found = _detector().detect(volume).landmarks
        brains += compare(name, volume, {}, found, missing="absent")
    assert len(brains) % len(marks) == 0
    kinds = {
        "half skulls": _outcomes(run, "half"),
        "nothing, noise": _outcomes(run, "blank"),
        "brains as small as a mouse's": brains,
    }
    kinds["all of these"] = [mark for outcomes in kinds.values() for mark in outcomes]
    note = "thresholds were chosen on the same specimens"
    for kind, outcomes in kinds.items():
        there = measure_presence(outcomes)
        invented = 100 * there.invented / there.absent
        what = f"absent, but detected: {kind}, {there.absent} landmarks"
        yield Row(what, invented, "%", limit=INVENTED_PERCENT, note=note)
    for kind in ("half", "whole"):
        there = measure_presence(_outcomes(run, kind))
        what = f"present, but not detected: {kind} skulls, {there.present} landmarks"
        yield Row(what, 100 * there.missed / there.present, "%", limit=LOST_PERCENT, note=note)


@cache
def _detector() -> Detector:
    return Detector(load_checked(MODEL, choose_device("auto"), "auto"))


def _names(run: Run) -> Sequence[str]:
    return UNSEEN[:1] if run.fast else UNSEEN


@cache
def _trials(name: str) -> Sequence[CalibrationRun]:
    data = real_scans()
    assert data is not None
    files = SpecimenFiles(name, scan_path(data, name), landmarks_path(data, name))
    return run_scan(_detector().model, files)


def _outcomes(run: Run, kind: str) -> list[Outcome]:
    """List the answers to scans of a kind, landmark by landmark."""
    trials = [trial for name in _names(run) for trial in _trials(name)]
    return [mark for trial in trials if trial.kind == kind for mark in trial.answer]


def _seconds_per_scan(run: Run) -> float:
    """Time whole scans from bytes in memory to landmarks; gives the median."""
    data = real_scans()
    assert data is not None
    spent = []
    for _ in range(run.rounds):
        for name in _names(run):
            start = time.perf_counter()
            _detector().detect(read_skull(data, name))
            spent.append(time.perf_counter() - start)
    return float(np.median(spent))
