"""A2 to A5: the mouse-skull model.

The weights that are shipped have learned from every skull at hand. Errors, regions and presence are
those of the models of its cross-validation, each on the skulls that it has not seen, if
``LANDMARKD_SKULL_FOLDS`` names the folder of a model that was trained with folds. They take the
presence thresholds that are shipped.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from app.compute.device import choose_device
from app.geometry import transform
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.model import LoadedModel
from app.training.calibrate.calibration import load_fold_models
from app.training.calibrate.calibration_runs import networks_of, run_scan
from app.training.calibrate.regions import in_units_of_growth, leave_one_out, usual_uncertainty
from app.training.calibrate.thresholds import with_thresholds
from app.training.data.folds import read_folds
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.metrics import errors_mm, group, measure_presence
from app.training.evaluate.outcomes import Outcome, compare, measure
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.scans import real_scans
from tests.support.skulls import (
    BRAINS,
    MODEL,
    SKULLS,
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

FOLDS: Final = "LANDMARKD_SKULL_FOLDS"
ABSENT: Final = "real scans are not at hand"
NO_FOLDS: Final = f"{ABSENT}, or {FOLDS} names no model with folds"


def a2_skulls(run: Run) -> Iterator[Row]:
    """Errors on whole skulls, and the time of one on this device."""
    errors = errors_mm(_unseen(run.fast))
    if len(errors):
        what = f"{len(errors)} landmarks of unseen skulls, any pose"
        yield Row(f"mean error, {what}", float(errors.mean()), "mm", limit=MEAN_MM)
        yield Row(f"95th percentile, {what}", float(np.percentile(errors, 95)), "mm", limit=P95_MM)
        yield Row(f"median, {what}", float(np.median(errors)), "mm")
        yield Row(f"largest, {what}", float(errors.max()), "mm")
    else:
        yield Row("mean error on unseen skulls", None, "mm", limit=MEAN_MM, note=NO_FOLDS)
    data = real_scans()
    if data is not None:
        seconds = _seconds_per_scan(data, run)
        yield Row("time per scan, both networks", seconds, "s", limit=SCAN_S)


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
    """How many errors lie within regions that come from all other skulls."""
    unseen = _unseen(run.fast)
    scaled = in_units_of_growth(unseen, usual_uncertainty(unseen))
    shares = leave_one_out(scaled, _detector().model.manifest.landmarks)
    if not shares:
        note = NO_FOLDS
        yield Row("errors outside of their region", None, "%", limit=OUTSIDE_PERCENT, note=note)
        return
    percents = [100 * share for share in shares.values()]
    inside = float(np.mean(percents))
    note = f"by skull {min(percents):.0f} to {max(percents):.0f} %, {len(percents)} skulls"
    yield Row("errors outside of their region", 100 - inside, "%", limit=OUTSIDE_PERCENT, note=note)
    yield Row("errors within their region", inside, "%", limit=INSIDE_PERCENT)


def a5_presence(run: Run) -> Iterator[Row]:
    """Landmarks of half skulls, of nothing, of noise and of brains."""
    data = real_scans()
    if data is None:
        yield Row("absent, but detected", None, "%", limit=INVENTED_PERCENT, note=ABSENT)
        return
    brains: list[Outcome] = []
    for name in BRAINS[: 1 if run.fast else len(BRAINS)]:
        volume = read_brain(data, name)
        found = _detector().detect(volume).landmarks
        brains += compare(name, volume, {}, found, missing="absent")
    unseen = _unseen_models(run.fast)
    models = unseen or dict.fromkeys(_names(run), _detector().model)
    runs = [one for name, model in models.items() for one in run_scan(model, _files(data, name))]
    by_kind = group(runs, lambda one: one.kind)
    half, blank, whole = (
        [mark for one in by_kind[kind] for mark in one.answer]
        for kind in ("half", "blank", "whole")
    )
    note = f"{len(models)} skulls, {'not seen' if unseen else 'which the model has learned from'}"
    kinds = {"half skulls": half, "nothing, noise": blank, "brains as small as a mouse's": brains}
    for kind, outcomes in kinds.items():
        there = measure_presence(outcomes)
        by = "by the model that is shipped" if outcomes is brains else note
        invented = 100 * there.invented / there.absent
        what = f"absent, but detected: {kind}, {there.absent} landmarks"
        yield Row(what, invented, "%", limit=INVENTED_PERCENT, note=by)
    for kind, outcomes in {"half": half, "whole": whole}.items():
        there = measure_presence(outcomes)
        missed = 100 * there.missed / there.present
        what = f"present, but not detected: {kind} skulls, {there.present} landmarks"
        yield Row(what, missed, "%", limit=LOST_PERCENT, note=note)


@cache
def _detector() -> Detector:
    return Detector(load_checked(MODEL, choose_device("auto"), "auto"))


def _names(run: Run) -> Sequence[str]:
    return SKULLS[:1] if run.fast else SKULLS


def _files(data: Path, name: str) -> SpecimenFiles:
    return SpecimenFiles(name, scan_path(data, name), landmarks_path(data, name))


@cache
def _unseen(fast: bool) -> Sequence[Outcome]:
    """Answer whole skulls, each by the models of the fold that held it out; none without folds."""
    data = real_scans()
    if data is None:
        return []
    return [
        outcome
        for name, model in _unseen_models(fast).items()
        for outcome in measure(Detector(model), [_files(data, name)], Console(stderr=True)).outcomes
    ]


@cache
def _unseen_models(fast: bool) -> Mapping[str, LoadedModel]:
    """Load the model that has not seen a skull, for each that is at hand; none without folds."""
    data, folder = real_scans(), Path(os.environ.get(FOLDS, ""))
    folds = read_folds(folder)
    if data is None or folds is None:
        return {}
    thresholds = [
        [landmark.presence_threshold for landmark in network.manifest.landmarks]
        for network in networks_of(_detector().model)
    ]
    members = folds.members[0] if fast else folds.by_scan()
    return {
        name: with_thresholds(model, thresholds)
        for name, model in load_fold_models(folder, folds, choose_device("auto")).items()
        if name in members and scan_path(data, name).exists()
    }


def _seconds_per_scan(data: Path, run: Run) -> float:
    """Time whole scans from bytes in memory to landmarks; gives the median."""
    spent = []
    for _ in range(run.rounds):
        for name in _names(run):
            start = time.perf_counter()
            _detector().detect(read_skull(data, name))
            spent.append(time.perf_counter() - start)
    return float(np.median(spent))
