"""Learning curves: what a model of eight spines gains from corrected cases, in which order."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from rich.console import Console

from app.compute.device import choose_device
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io import read_volume
from app.model import WHOLE
from app.training.data.specimens import SpecimenFiles
from app.training.data.split import split
from app.training.evaluate.outcomes import validate
from app.training.evaluate.spread import bootstrap_interval
from app.training.learn import LearnOptions, case_losses, fine_tune, merged, options_like
from app.training.options import Options, Schedule
from app.training.pipeline import FIRST, check_and_report, train_network
from app.training.versions import prepare_next
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.scans import real_scans
from tests.support.spines import UNSEEN, spine_files

KNOWN: Final = 8
"""Subjects that the first model is trained on."""

COUNTS: Final = (2, 5, 10, 20)
ENOUGH: Final = 10
SEED: Final = 0

STEPS_PER_MINUTE: Final = 36
"""Of the first training, such that all trainings together take about that long on one core."""

TUNED: Final = 3
"""A model is trained on for the first training's steps over this."""

TO_ALL: Final = Limit(1.25, "cost")
LABELS_PERCENT: Final = Limit(70.0, "figure")
RADIUS_MM: Final = 16.0
RATE: Final = 2e-3
TUNING_RATE: Final = 5e-4

QUIET: Final = Console(quiet=True)


def learning(run: Run) -> Iterator[Row]:
    """Error on unseen subjects against the number of corrected cases, by the order of these."""
    data = real_scans()
    what = f"error after {ENOUGH} corrected cases against all data"
    if data is None:
        yield Row(what, None, "mm", limit=TO_ALL, note="real scans are not at hand")
        return
    steps = 4 if run.fast else max(round(STEPS_PER_MINUTE * run.minutes), 1)
    counts = COUNTS[:1] if run.fast else COUNTS
    known, pool, unseen = _subjects(data)
    unseen = unseen[: 1 if run.fast else None]
    with TemporaryDirectory() as folder:
        base = _train(Path(folder, "base", "spine"), known, steps)
        best = _train(Path(folder, "all", "spine"), [*known, *pool], steps + steps // TUNED)
        before, after = _losses(base, unseen), _losses(best, unseen)
        yield _row("no corrected case", before, after)
        curves = {}
        for order, cases in _orders(base, pool).items():
            curves[order] = [float(before.mean())]
            for count in counts:
                tuned = _learn(base, known, cases[:count], max(steps // TUNED, 1))
                losses = _losses(tuned, unseen)
                curves[order].append(float(losses.mean()))
                limit = TO_ALL if count == ENOUGH else None
                yield _row(f"{count} corrected cases, {order}", losses, after, limit)
    share = 100 * _labels((0, *counts), *curves.values()) / counts[-1]
    yield Row("labels by expected gain for the error at random", share, "%", limit=LABELS_PERCENT)


def _subjects(
    data: Path,
) -> tuple[list[SpecimenFiles], list[SpecimenFiles], list[SpecimenFiles]]:
    """Split the subjects into those that are known, the pool, and those that nobody learns from."""
    names = sorted(
        path.name.removesuffix(".nii.gz") for path in (data / "lumbar-mri" / "scans").iterdir()
    )
    seen = [spine_files(data, name) for name in names if name not in UNSEEN]
    shuffled = [seen[index] for index in np.random.default_rng(SEED).permutation(len(seen))]
    first, last = KNOWN, KNOWN + COUNTS[-1]
    unseen = [spine_files(data, name) for name in UNSEEN]
    return shuffled[:first], shuffled[first:last], [*unseen, *shuffled[last:]]


def _train(folder: Path, cases: Sequence[SpecimenFiles], steps: int) -> Path:
    """Train a first network as the card of lumbar-mri says."""
    with merged(cases) as (scans, landmarks):
        options = Options(
            scans=scans, landmarks=landmarks, folder=folder, hold_out=(), spacing_mm=4.0,
            radius_mm=RADIUS_MM, tile=WHOLE, filters=(24, 48, 96, 128), stride=2,
            schedule=Schedule(steps, None, RATE, 1), mirror=True, start=None, device="auto",
            strict=False, rotation_deg=25.0, scale=0.2, elastic_mm=3.0, contrast=0.6, reflect=0.3,
            cuts=0.5,
        )  # fmt: skip
        train_network(options, FIRST, QUIET)
    return folder


def _learn(
    base: Path, known: Sequence[SpecimenFiles], corrected: Sequence[SpecimenFiles], steps: int
) -> Path:
    """Let a model learn from corrected cases, as ``landmarkd learn`` does."""
    candidate = prepare_next(base)
    given = LearnOptions(base, base, None, None, steps, TUNING_RATE, "auto")
    with merged([*known, *corrected]) as (scans, landmarks):
        options = replace(options_like(given, scans, landmarks, candidate), hold_out=())
        checked = check_and_report(options, QUIET)
        fine_tune(options, checked, split(checked.specimens, ()), QUIET)
    return candidate


def _losses(folder: Path, cases: Sequence[SpecimenFiles]) -> np.ndarray:
    outcomes = validate(folder, cases, choose_device("auto"))
    return case_losses(outcomes, {files.name: {} for files in cases}, RADIUS_MM)


def _orders(base: Path, pool: Sequence[SpecimenFiles]) -> dict[str, list[SpecimenFiles]]:
    """Order cases at random, and by what a person would have to correct, as the model expects."""
    detector = Detector(load_checked(base, choose_device("auto")))

    @cache
    def doubt(files: SpecimenFiles) -> float:
        found = detector.detect(read_volume(files.scan.read_bytes())).landmarks
        return float(np.mean([1.0 - landmark.confidence for landmark in found]))

    by_gain = sorted(pool, key=doubt, reverse=True)
    return {"at random": list(pool), "by expected gain": by_gain}


def _row(what: str, losses: np.ndarray, best: np.ndarray, limit: Limit | None = None) -> Row:
    low, high = bootstrap_interval(losses)
    note = (
        f"95 % interval {low:.2f} to {high:.2f} mm, {len(losses)} unseen subjects, "
        f"their median {np.median(losses):.2f} mm"
    )
    shown = limit or Limit(None, "cost")
    mean, theirs = float(losses.mean()), float(best.mean())
    return Row(f"error with {what}", mean, "mm", "all data", theirs, limit=shown, note=note)


def _labels(counts: Sequence[int], random: Sequence[float], gain: Sequence[float]) -> float:
    """Interpolate how many cases by expected gain give the last error at random; inf: too few."""
    for at in range(1, len(counts)):
        if gain[at] <= random[-1]:
            fall = gain[at - 1] - gain[at]
            part = (gain[at - 1] - random[-1]) / fall if fall > 0 else 1.0
            return counts[at - 1] + max(part, 0.0) * (counts[at] - counts[at - 1])
    return float("inf")
