"""Kept cases -> the next version of a model, put in place only if it is better on others.

What one version was trained on is never held out for the next, and the other way round.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console

from app.compute import choose_device
from app.errors import BadParameter
from app.model import WHOLE, Manifest, load_shape, read_manifest
from app.shapes import MIN_COMMON
from app.training.data.check_data import CheckedData
from app.training.data.issues import print_warning, shorten
from app.training.data.specimens import SpecimenFiles, list_files, merged
from app.training.data.split import Split, split, subject_of
from app.training.data.summary import summarise
from app.training.evaluate.comparison import Comparison, compare_versions
from app.training.evaluate.leakage import find_leaked
from app.training.evaluate.model_card import LEARNED, write_section
from app.training.evaluate.outcomes import validate
from app.training.files import CHECKPOINT
from app.training.fit.canonical_pose import has_pose
from app.training.fit.loop import Plan
from app.training.fit.suggest import suggest_recipe, suggest_refine_recipe
from app.training.options import Options
from app.training.pipeline import check_and_report, make_plan, run
from app.training.recipe import Augmentation
from app.training.record import Record, find_changes, read_record, refuse_taken_back, seen_by
from app.training.versions import (
    exclusive,
    find_unfinished,
    finish,
    keep_measured,
    prepare_next,
    put_in_place,
)

HELD_OUT: Final = 3
"""One in so many kept cases is held out."""

MIN_HELD_OUT: Final = 5
"""An interval over fewer cases says nothing."""

UPRIGHT_DEG: Final = 25.0
"""Random rotations for a model of upright scans that does not say how it was trained."""


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """The options of ``landmarkd learn``.

    Attributes:
        cases: The model's folder in a store.
        old: Folders of scans and of landmark files that the model was trained on, if at hand.
        hold_out: Names of old scans that it was not trained on, besides those of its record.
        steps: Optimiser steps of each network.
        rate: Peak learning rate.
    """

    folder: Path
    cases: Path
    old: tuple[Path, Path] | None
    hold_out: tuple[str, ...] | None
    steps: int
    rate: float
    device: str


def learn(options: LearnOptions, console: Console) -> Comparison | None:
    """Train the next version of a model, and put it in place if it is better.

    Returns:
        How it compares with the version before; None if the training was interrupted.

    Raises:
        BadParameter: There are too few cases, an old scan has the name of another kept case, the
            model does not answer one that is held out, or it cannot be trained here.
        StartupError: The data are wrong, the folders cannot be exchanged, or another process learns
            for the same model.
        ModelRefused: The folder is no model.
    """
    with exclusive(options.folder):
        return _learn_alone(options, console)


def _learn_alone(options: LearnOptions, console: Console) -> Comparison | None:
    kept = whole_cases(options.cases)
    given = list_files(*options.old).pairs() if options.old else []
    again = find_corrected(kept, given)
    old = [files for files in given if files.name not in again]
    if alike := {files.name for files in kept}.intersection(files.name for files in old):
        raise BadParameter(
            "--with: expected scans of other names than those of kept cases, got other scans named "
            f"{shorten(sorted(alike))}: rename these, and their landmark files"
        )
    held_out = hold_out(options, kept, old, again)
    if again:
        console.print(f"{len(again)} scans of --with were corrected and kept: only that counts")
    if not given:
        _warn_of_forgetting(options.folder, len(kept), console)
    candidate = find_unfinished(options.folder) or prepare_next(options.folder)
    with merged([*kept, *old]) as (scans, landmarks):
        like = options_like(options, scans, landmarks, candidate)
        checked = check_and_report(like, console)
        names = [files.name for files in held_out]
        # Before hours of training, as there may be scans that the model does not answer.
        before = validate(options.folder, held_out, choose_device(options.device))
        if not fine_tune(like, checked, split(checked.specimens, names, "kept apart"), console):
            return None
    keep_measured(options.folder, candidate)
    corrected = {files.name for files in kept}
    after = validate(candidate, held_out, choose_device(options.device))
    compared = compare_versions(options.folder, candidate, held_out, corrected, (before, after))
    if compared.is_better:
        text = f"Version {compared.versions[1]} was learned from {len(kept)} kept cases."
        rest = f"What else is said here of errors was measured of {compared.versions[0]} or before."
        write_section(candidate, LEARNED, f"{text} {compared.describe()}. {rest}")
    finish(candidate)
    if compared.is_better:
        put_in_place(candidate, options.folder)
    return compared


def _warn_of_forgetting(folder: Path, cases: int, console: Console) -> None:
    record = "recipe.json names them" if read_record(folder) else "no recipe.json names them"
    print_warning(
        f"{folder.name} learns from {cases} kept cases only, and forgets what it knows from the "
        f"scans that it was trained on ({record}). Where you have these, give them: "
        "--with SCANS LANDMARKS, and as --validate NAME,NAME those that it was not trained on",
        console,
    )


def whole_cases(folder: Path) -> list[SpecimenFiles]:
    """List the cases of a model in a store.

    Raises:
        BadParameter: There are none.
    """
    scans, landmarks = folder / "scans", folder / "landmarks"
    found = list_files(scans, landmarks).pairs() if scans.is_dir() and landmarks.is_dir() else []
    if not found:
        raise BadParameter(
            f"--from: expected a model's folder in a store, STORE/NAME, with cases; {folder} has "
            "none"
        )
    return found


def find_corrected(kept: Sequence[SpecimenFiles], old: Sequence[SpecimenFiles]) -> dict[str, str]:
    """Find the old scans that are kept cases, too.

    Returns:
        The name of the case, by that of the old scan.
    """
    cases = {}
    for files in kept if old else ():
        if (specimen := summarise(files)[0]) is not None:
            cases[specimen.digest] = files.name
    summaries = (summarise(files)[0] for files in old)
    return {one.name: cases[one.digest] for one in summaries if one and one.digest in cases}


def hold_out(
    options: LearnOptions,
    kept: Sequence[SpecimenFiles],
    old: Sequence[SpecimenFiles],
    again: Mapping[str, str] = MappingProxyType({}),
) -> list[SpecimenFiles]:
    """List the cases that no version is trained on.

    The old scans are those of ``--with`` that are no kept cases. For the names of the others,
    ``again`` has those of their cases: what is known of a scan is known of its case.

    Raises:
        BadParameter: They are too few to tell which version is better, not unseen, or not there.
    """
    known = {files.name for files in [*kept, *old]} | again.keys()
    if unknown := sorted(set(options.hold_out or ()) - known):
        raise BadParameter(
            f"--validate: expected names of scans that --with gives, found none named "
            f"{shorten(unknown)}"
        )
    record = read_record(options.folder)
    trained = {again.get(name, name) for name in seen_by(record)}
    trained.update(find_leaked(options.folder, [*kept, *old]))
    before = {again.get(name, name) for name in record.get("held_out", ())} - trained
    cases, known_of = [files.name for files in kept], {"train": trained, "held_out": before}
    new = choose_held_out(cases, known_of)
    names = {*before, *new, *(again.get(name, name) for name in options.hold_out or ())}
    chosen = [files for files in [*kept, *old] if files.name in names]
    if leaked := [files.name for files in chosen if files.name in trained]:
        raise BadParameter(
            f"--validate: expected scans that {options.folder} was not trained on, got "
            f"{shorten(leaked)}"
        )
    if (count := len({subject_of(files.name) for files in chosen})) < MIN_HELD_OUT:
        fresh = find_new(cases, known_of)
        more = _missing_cases(len(fresh), len({subject_of(one.name) for one in chosen} - fresh))
        raise BadParameter(
            f"expected at least {MIN_HELD_OUT} cases to be held out, or nobody can tell which "
            f"version is better; got {count}: one in {HELD_OUT} of {len(kept)} kept cases, "
            "without those that the model has learned from, and those old ones that recipe.json or "
            f"--validate names. Nothing was trained; keep {more} more, of scans that it has not "
            "learned from"
        )
    return chosen


def _missing_cases(new: int, others: int) -> int:
    """Count the cases, besides new ones, from which on enough are held out with others."""
    numbers = itertools.count(1)
    return next(n for n in numbers if others + round((new + n) / HELD_OUT) >= MIN_HELD_OUT)


def choose_held_out(kept: Sequence[str], record: Mapping[str, Any]) -> list[str]:
    """Choose which kept cases are held out, besides those that were for the version in place.

    Frames of one file are held out together, as are all scans of one subject.

    Args:
        kept: Names of all kept cases.
        record: Of the version in place; a case that it was trained on cannot be held out any more.

    Returns:
        One in ``HELD_OUT`` of the new ones, by a hash of the subject, so that the others are left
        to learn from; and what is new of the subjects that are held out.
    """
    new, before = find_new(kept, record), set(record.get("held_out", ()))
    by_hash = sorted((hashlib.sha256(one.encode()).digest(), one) for one in new)
    count = round(len(new) / HELD_OUT)
    if len(new) == 1:  # Else none would ever be held out where each version learns from one more.
        count = int(by_hash[0][0][0] % HELD_OUT == 0)
    held_out = {subject_of(name) for name in before}
    held_out -= {subject_of(name) for name in seen_by(record)}
    held_out |= {one for _, one in by_hash[:count]}
    return [name for name in kept if subject_of(name) in held_out and name not in before]


def find_new(kept: Iterable[str], record: Mapping[str, Any]) -> set[str]:
    """List the subjects of kept cases that a version was neither trained on nor judged by."""
    known = seen_by(record).union(record.get("held_out", ()))
    return {subject_of(name) for name in kept} - {subject_of(name) for name in known}


def options_like(options: LearnOptions, scans: Path, landmarks: Path, folder: Path) -> Options:
    """Make the options that a model was trained with, as far as it tells.

    Raises:
        BadParameter: It is not one that is trained here.
    """
    manifest = read_manifest(options.folder)
    return Options(
        scans=scans,
        landmarks=landmarks,
        folder=folder,
        hold_out=None,
        tile=WHOLE if manifest.input.tile_shape == WHOLE else manifest.input.tile_shape[0],
        steps=options.steps,
        batch=None,
        rate=options.rate,
        seed=1,
        start=options.folder,
        device=options.device,
        strict=False,
        intensity=manifest.input.intensity,
        **_common(manifest, read_record(options.folder)),
    )


def _common(manifest: Manifest, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that each of a model's networks has for itself."""
    filters = manifest.network.arguments.get("filters")
    if not isinstance(filters, list):
        raise BadParameter(
            f"expected a model that landmarkd train has made, {manifest.name} is of another kind"
        )
    recipe = record.get("recipe", {})
    is_upright = manifest.input.upright and manifest.input.tile_shape == WHOLE  # As in service.
    random = {"rotation_deg": UPRIGHT_DEG} if is_upright else {}
    random |= recipe.get("augmentation", {})
    return {
        "spacing_mm": min(manifest.input.spacing_mm),
        "radius_mm": manifest.voting.radius_mm,
        "filters": tuple(filters),
        "stride": manifest.network.output_stride,
        "mirror": record.get("mirror", False),
        "missing": recipe.get("missing", "unknown"),
        "cuts": recipe.get("cuts", 0.0),
        # Those of an older release may have others, too.
        "augmentation": {
            one.name: random[one.name] for one in fields(Augmentation) if one.name in random
        },
    }


def fine_tune(options: Options, checked: CheckedData, chosen: Split, console: Console) -> bool:
    """Train both networks of a model on, from the weights that they have.

    A training that was interrupted is resumed, if it was started alike; else it is made anew. The
    folder of the options is that of the next version, their start the one in place.

    Returns:
        Whether it is done; False if it was interrupted.

    Raises:
        BadParameter: The model cannot be trained here, or would be the version taken back.
    """
    plans = plan_networks(options, checked, chosen)
    refuse_taken_back(options.start or options.folder, plans[0].record)
    begun = [plan for plan in plans if (plan.folder / CHECKPOINT).exists()]
    if changes := [change for plan in begun for change in find_changes(plan.folder, plan.record)]:
        print_warning(
            "the training that was interrupted is not resumed but made anew, as it was started "
            f"with other options or cases: {'; '.join(changes)}",
            console,
        )
        prepare_next(options.start or options.folder)
    return all(run(plan, console) for plan in plans)


def plan_networks(options: Options, checked: CheckedData, chosen: Split) -> list[Plan]:
    """Make all choices for each network of a model, before any of them is trained.

    Their mean shapes stay: a few cases are no better ones, and second networks know one pose only.

    Returns:
        That of the first network, and of the second one if there is one.
    """
    start = options.start or options.folder
    manifest = read_manifest(start)
    names = tuple(landmark.name for landmark in manifest.landmarks)
    suggested = suggest_recipe(options, checked)
    plan = make_plan(options, names, chosen, suggested, None)
    plans = [replace(plan, record=remember_held_out(plan.record, start))]
    if manifest.refine is None:
        return plans
    inner = manifest.refine.folder
    start /= inner
    finer = read_manifest(start)
    common = _common(finer, read_record(start))
    options = replace(options, inner=inner, start=start, **common)
    shape = load_shape(start, finer)
    if shape is None or finer.input.tile_shape == WHOLE:
        raise BadParameter(f"expected a second network with a mean shape, {start} has none")
    if not any(has_pose(one.rows(names), shape.mean) for one in chosen.train):
        raise BadParameter(
            f"expected cases with at least {MIN_COMMON} landmarks that lie in no line, as the pose "
            "that the second network sees follows from them, got none"
        )
    recipe, choices = suggest_refine_recipe(options, checked, manifest, shape.mean)
    recipe = replace(recipe, tile_shape=finer.input.tile_shape)
    plan = make_plan(options, names, chosen, (recipe, choices), shape.mean)
    return [*plans, replace(plan, record=remember_held_out(plan.record, start))]


def remember_held_out(record: Record, start: Path) -> Record:
    """Record what was held out for the version before, too, where it is not at hand this time.

    Else it would be trained on as soon as it is.
    """
    known = {*record.train, *record.held_out}
    before = read_record(start)
    more = (name for name in before.get("held_out", ()) if name not in known)
    return replace(record, held_out=(*record.held_out, *more))
