"""Calibration runs -> regions and thresholds, what they promise, and the new model.toml."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomlkit
import typer
from rich.console import Console
from rich.table import Table

from app.model import LoadedModel, read_manifest
from app.training.calibrate.calibration_runs import KINDS, Trial, networks_of, thresholds_from
from app.training.calibrate.regions import (
    COVERAGE,
    Region,
    calibrate_regions,
    left_out,
    promise_of,
    proven_of,
    sure_errors,
)
from app.training.calibrate.thresholds import Thresholds
from app.training.data.folds import Folds
from app.training.evaluate.leakage import refuse_learned
from app.training.evaluate.metrics import measure_presence
from app.training.evaluate.outcomes import Outcome, Pair, choose_pairs, summary
from app.training.fit.export import attach_refine


def choose_unseen(model: Path, scans: Path, landmarks: Path, only: Sequence[str]) -> Sequence[Pair]:
    """Pair scans and landmark files: the named ones, or all, as each fold leaves some out.

    Raises:
        BadParameter: One is not there, or the model has learned from one that is named.
    """
    try:
        pairs = choose_pairs(scans, landmarks, only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if only:
        refuse_learned(model, pairs)
    return pairs


def conclude(
    folder: Path,
    model: LoadedModel,
    before: Sequence[Trial],
    after: Sequence[Trial],
    console: Console,
    folds: Folds | None = None,
) -> str:
    """Choose regions and thresholds, say what they rest on, and write them.

    Args:
        folder: The model folder.
        model: The model as it is.
        before: Trials of all scans with the model as it is; say the thresholds.
        after: Trials of each scan with the thresholds that the others say; say the regions.
        console: Where to tell it.
        folds: Whose models the trials are of, each with scans that it never saw; None: they are of
            the model itself.

    Returns:
        What regions were taken, and what they promise.

    Raises:
        BadParameter: The errors are too few for any region; nothing is written.
    """
    names = [landmark.name for landmark in model.manifest.landmarks]
    whole = [outcome for trial in after if trial.kind == "whole" for outcome in trial.answer]
    console.print(summary(whole))
    regions = calibrate_regions(whole, names)
    if regions is None:
        raise typer.BadParameter(too_few(whole))
    thresholds = thresholds_from(model, before)
    titles = ("thresholds", "thresholds of the second network")
    for title, chosen, network in zip(titles, thresholds, networks_of(model), strict=False):
        old = [landmark.presence_threshold for landmark in network.manifest.landmarks]
        console.print(f"{title}: {say_thresholds(chosen, old)}")
    print_presence(before, after, console)
    if len({trial.scan for trial in before}) == 1:
        console.print("[yellow]One scan: its thresholds were tried on itself.[/yellow]")
    told = f"{say_regions(regions)}; {say_promise(regions, folds)}"
    console.print(told)
    covered = ", ".join(f"{name} {100 * s:.0f} %" for name, s in left_out(whole, names).items())
    console.print(f"errors within the regions of the other scans: {covered or 'too few scans'}")
    values = [None if chosen is None else chosen.values for chosen in thresholds]
    write_calibration(folder, regions, values)
    return told


def too_few(outcomes: Sequence[Outcome]) -> str:
    """Say that the errors are too few for what was asked, and what they could promise."""
    count = len(sure_errors(outcomes))
    least = math.ceil(COVERAGE / (1 - COVERAGE))
    return (
        f"expected at least {least} errors of detected landmarks for a region of 95 %, got "
        f"{count}, which can promise {100 * promise_of(count):.0f} % at most; nothing was written"
    )


def say_thresholds(chosen: Thresholds | None, old: Sequence[float]) -> str:
    """Say what thresholds were chosen, and of what."""
    was = f"was {min(old):.3f} to {max(old):.3f}"
    if chosen is None:
        return f"too few masses, so none is changed ({was})"
    lower, upper = chosen.masses.bounds()
    values, masses = chosen.values, chosen.masses
    return (
        f"{min(values):.3f} to {max(values):.3f} ({was}), {chosen.own} of {len(values)} landmarks "
        f"by their own masses; of all, 2 % of {len(masses.present)} right answers have less than "
        f"{upper:.3f}, 2 % of {len(masses.absent)} absent ones more than {lower:.3f}"
    )


def say_regions(regions: Mapping[str, Region]) -> str:
    """Say what regions were taken, what of, and what they promise."""
    own = [region for region in regions.values() if region.own]
    shared = [region for region in regions.values() if not region.own]
    parts = []
    if own:
        radii = [region.radius_mm for region in own]
        parts.append(
            f"{len(own)} landmarks have a region of their own, {min(radii):.3f} to "
            f"{max(radii):.3f} mm, of at least {min(region.errors for region in own)} errors"
        )
    if shared:
        parts.append(
            f"{len(shared)} landmarks share one of {shared[0].radius_mm:.3f} mm, of "
            f"{shared[0].errors} errors of all landmarks: it holds on average over them"
        )
    return f"regions: {'; '.join(parts)}"


def say_promise(regions: Mapping[str, Region], folds: Folds | None) -> str:
    """Say how sure it is that a further error stays within."""
    promise = min(region.promise for region in regions.values())
    if folds is None:
        return f"a further error stays within with {100 * promise:.1f} %"
    specimens, count = len(set(folds.of_subjects().values())), len(folds.members)
    proven = proven_of(specimens, count)
    return (
        f"a further error is expected within with about {100 * promise:.1f} %, as these are errors "
        f"of {count} models on {specimens} specimens that they never saw (cross-conformal); at "
        f"least {100 * proven:.0f} % is proven for regions around the answers of these models, and "
        "for those of one model trained on all specimens only as far as it answers as they do"
    )


def print_presence(before: Sequence[Trial], after: Sequence[Trial], console: Console) -> None:
    """Print what is missed and what is invented, before and after."""
    table = Table("scans", "present", "missed", "after", "absent", "invented", "after", box=None)
    for kind in KINDS:
        was, now = (
            measure_presence([o for trial in trials if trial.kind == kind for o in trial.answer])
            for trials in (before, after)
        )
        table.add_row(
            kind,
            str(was.present), percent(was.missed, was.present), percent(now.missed, now.present),
            str(was.absent), percent(was.invented, was.absent), percent(now.invented, now.absent),
        )  # fmt: skip
    console.print(table)
    console.print("missed: present, but not detected; invented: absent, but detected")


def percent(part: int, whole: int) -> str:
    """Write a share in per cent; empty of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def write_calibration(
    folder: Path, regions: Mapping[str, Region], thresholds: Sequence[Sequence[float] | None]
) -> None:
    """Write regions and thresholds into the ``model.toml`` of a folder, and of that within it.

    Args:
        folder: The model folder.
        regions: By landmark; go to the second model if there is one, as the answers come from it.
        thresholds: Of the network, and of the second one if there is one; None: they stay.
    """
    refine = read_manifest(folder).refine
    folders = [folder] if refine is None else [folder, folder / refine.folder]
    for inner, values in zip(folders, thresholds, strict=True):
        path = inner / "model.toml"
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
        for index, landmark in enumerate(document["landmarks"]):
            if values is not None:
                landmark["presence_threshold"] = round(values[index], 3)
            if inner == folders[-1]:
                # Rounded up, as what is promised of the radius holds of no smaller one.
                radius = regions[landmark["name"]].radius_mm
                landmark["region95_mm"] = math.ceil(1000 * radius) / 1000
        path.write_text(tomlkit.dumps(document), encoding="utf-8")
    if refine is not None:
        attach_refine(folders[-1])
