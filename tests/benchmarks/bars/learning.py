"""Learning curves: what a model of eight subjects gains from corrected cases, in which order."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from rich.console import Console

from app.compute.device import choose_device, fast_precisions
from app.geometry import transform
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io import markups_json, read_landmarks, read_volume
from app.model import WHOLE
from app.shapes import register
from app.training.data.specimens import SpecimenFiles, list_files, merged, pair_files
from app.training.data.split import split
from app.training.evaluate.comparison import case_losses
from app.training.evaluate.outcomes import validate
from app.training.evaluate.spread import mean_interval
from app.training.learn import LearnOptions, fine_tune, options_like
from app.training.options import Options
from app.training.pipeline import check_and_report, train_network
from app.training.versions import prepare_next
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.scans import real_scans
from tests.support import skulls, spines

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
RATE: Final = 2e-3
TUNING_RATE: Final = 5e-4

QUIET: Final = Console(quiet=True)

SPINES: Final[Mapping[str, Any]] = {
    "spacing_mm": 4.0, "radius_mm": 16.0, "mirror": True, "cuts": 0.5,
    "augmentation": {
        "rotation_deg": 25.0, "scale": 0.2, "elastic_mm": 3.0, "contrast": 0.6, "reflect": 0.3,
    },
}  # fmt: skip
"""As the card of lumbar-mri says for its first network."""

SKULLS: Final[Mapping[str, Any]] = {
    "spacing_mm": 0.42, "radius_mm": 2.1, "mirror": False, "cuts": 0.3,
    "augmentation": {"scale": 0.15, "elastic_mm": 0.25},
}  # fmt: skip
"""As the card of mouse-skull says for its first network."""

EXCHANGED: Final = "SF_CamEiJ"
"""Two landmarks of this head have each other's names."""

UNSEEN_SKULLS: Final = 11


@dataclass(frozen=True, slots=True)
class Cohort:
    """Subjects, and how a first network is trained on them.

    Attributes:
        known: Those that the first model is trained on.
        pool: Those that may be corrected, in random order.
        unseen: Those that nobody learns from.
        options: Of the training.
        steps: Of the first model's training.
    """

    known: list[SpecimenFiles]
    pool: list[SpecimenFiles]
    unseen: list[SpecimenFiles]
    options: Mapping[str, Any]
    steps: int

    @property
    def tuning_steps(self) -> int:
        """Steps of each training on corrected cases."""
        return max(self.steps // TUNED, 1)


def learning(run: Run) -> Iterator[Row]:
    """Error on unseen spines against the number of corrected cases, by the order of these."""
    data = real_scans()
    if data is None:
        yield _missing()
        return
    names = sorted(
        path.name.removesuffix(".nii.gz") for path in (data / "lumbar-mri" / "scans").iterdir()
    )
    seen = _shuffled(
        [spines.spine_files(data, name) for name in names if name not in spines.SUBJECTS]
    )
    last = KNOWN + COUNTS[-1]
    unseen = [spines.spine_files(data, name) for name in spines.SUBJECTS] + seen[last:]
    cohort = Cohort(seen[:KNOWN], seen[KNOWN:last], unseen, SPINES, _steps(run))
    yield from _curve(run, cohort)


def learning_skulls(run: Run) -> Iterator[Row]:
    """Error on unseen skulls against the number of corrected cases, by the order of these."""
    data = real_scans()
    if data is None:
        yield _missing()
        return
    folder = data / "mouse-skull"
    posed = pair_files(folder / "scans", folder / "landmarks")
    others = _shuffled([files for files in posed if files.name not in skulls.SKULLS])
    split_at = UNSEEN_SKULLS - len(skulls.SKULLS)
    unseen = [files for files in posed if files.name in skulls.SKULLS] + others[:split_at]
    known, rest = others[split_at:][:KNOWN], others[split_at:][KNOWN:]
    with _moved(folder / "unposed", 1 if run.fast else COUNTS[-1] - len(rest)) as moved:
        is_fast = "bfloat16" in fast_precisions(choose_device("auto"))
        given = {**SKULLS, "precision": "bfloat16" if is_fast else "float32"}
        pool = _shuffled([*rest, *moved])
        yield from _curve(run, Cohort(known, pool, unseen, given, _steps(run)))


def _missing() -> Row:
    what = f"error after {ENOUGH} corrected cases against all data"
    return Row(what, None, "mm", limit=TO_ALL, note="real scans are not at hand")


def _steps(run: Run) -> int:
    return 1 if run.fast else max(round(STEPS_PER_MINUTE * run.minutes), 1)


def _shuffled(files: Sequence[SpecimenFiles]) -> list[SpecimenFiles]:
    return [files[index] for index in np.random.default_rng(SEED).permutation(len(files))]


@contextmanager
def _moved(folder: Path, count: int) -> Iterator[list[SpecimenFiles]]:
    """Move landmarks that lie in an atlas's frame into their scans, by the shipped model.

    Six numbers of a head come from a model that knows the others; no error is measured on them.
    """
    detector = Detector(load_checked(skulls.MODEL, choose_device("auto")))
    specimens = pair_files(folder / "scans", folder / "landmarks")
    with TemporaryDirectory() as moved:
        for files in [files for files in specimens if files.name != EXCHANGED][:count]:
            placed = read_landmarks(files.landmarks)
            answer = detector.detect(read_volume(files.scan.read_bytes())).landmarks
            detected = {one.name: one.ras_mm for one in answer if one.status == "detected"}
            into_scan = register(moving=detected, fixed=placed).fixed_to_moving
            points = transform(into_scan, np.stack(list(placed.values())))
            path = Path(moved, files.landmarks.name)
            path.write_text(markups_json(list(placed), points), encoding="utf-8")
        yield list_files(folder / "scans", Path(moved)).pairs()


def _curve(run: Run, cohort: Cohort) -> Iterator[Row]:
    counts = COUNTS[:1] if run.fast else COUNTS
    unseen = cohort.unseen[: 1 if run.fast else None]
    if run.fast:
        cohort = replace(cohort, known=cohort.known[:2], pool=cohort.pool[: counts[-1]])
    radius_mm = float(cohort.options["radius_mm"])
    everybody = [*cohort.known, *cohort.pool]
    longer = cohort.steps + cohort.tuning_steps
    with TemporaryDirectory() as folder:
        base = _train(Path(folder, "base", "first"), cohort, cohort.known, cohort.steps)
        best = _train(Path(folder, "all", "first"), cohort, everybody, longer)

        @cache
        def losses_after(corrected: frozenset[SpecimenFiles]) -> np.ndarray:
            return _losses(_learn(base, cohort, corrected), unseen, radius_mm)

        before, after = (_losses(model, unseen, radius_mm) for model in (base, best))
        yield _row("no corrected case", before, after)
        curves = {}
        for order, cases in _orders(base, cohort.pool).items():
            curves[order] = [float(before.mean())]
            for count in counts:
                losses = losses_after(frozenset(cases[:count]))
                curves[order].append(float(losses.mean()))
                limit = TO_ALL if count == ENOUGH else None
                yield _row(f"{count} corrected cases, {order}", losses, after, limit)
    share = 100 * _labels((0, *counts), *curves.values()) / counts[-1]
    yield Row("labels by expected gain for the error at random", share, "%", limit=LABELS_PERCENT)


def _train(folder: Path, cohort: Cohort, cases: Sequence[SpecimenFiles], steps: int) -> Path:
    with merged(cases) as (scans, landmarks):
        options = Options(
            scans=scans, landmarks=landmarks, folder=folder, hold_out=(), tile=WHOLE,
            filters=(24, 48, 96, 128), stride=2, steps=steps, batch=None, rate=RATE, seed=1,
            start=None, device="auto", strict=False, **cohort.options,
        )  # fmt: skip
        train_network(options, QUIET)
    return folder


def _learn(base: Path, cohort: Cohort, corrected: frozenset[SpecimenFiles]) -> Path:
    """Let a model learn from corrected cases, as ``landmarkd learn`` does."""
    candidate = prepare_next(base)
    given = LearnOptions(base, base, None, None, cohort.tuning_steps, TUNING_RATE, "auto")
    cases = sorted(corrected, key=lambda files: files.name)
    with merged([*cohort.known, *cases]) as (scans, landmarks):
        options = replace(options_like(given, scans, landmarks, candidate), hold_out=())
        checked = check_and_report(options, QUIET)
        fine_tune(options, checked, split(checked.specimens, ()), QUIET)
    return candidate


def _losses(folder: Path, cases: Sequence[SpecimenFiles], radius_mm: float) -> np.ndarray:
    outcomes = validate(folder, cases, choose_device("auto"))
    return case_losses(outcomes, radius_mm)


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
    low, high = mean_interval(losses)
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
