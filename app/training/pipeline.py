"""Options -> a trained network: check the data, make all choices, read the specimens, train.

A model has one network or two. The first sees scans as they come; the second, in the folder
``refine`` within the first one's, sees the subject closer, in the pose that the first has found.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from app.compute import choose_device, describe_out_of_memory, is_out_of_memory
from app.errors import BadParameter, InsufficientMemory, StartupError
from app.geometry import Points
from app.model import WHOLE, IntensitySpec, read_manifest
from app.shapes import MIN_COMMON, MIN_LANDMARKS, mean_shape
from app.training.data.check_data import CheckedData, check_data
from app.training.data.folds import content_digests
from app.training.data.issues import LINE_NAMES, issue_table, print_warning, shorten
from app.training.data.mirror import with_mirror_images
from app.training.data.specimens import Specimen, SpecimenFiles, load_specimen
from app.training.data.split import Split, split
from app.training.data.summary import SpecimenSummary
from app.training.files import CHECKPOINT, RECORD, refuse_damaged
from app.training.fit.canonical_pose import (
    fit_pose,
    has_pose,
    pose_specimen,
    rotate_like,
    upright,
)
from app.training.fit.export import check_exportable
from app.training.fit.loop import Plan, train
from app.training.fit.network import bring_to, build_network
from app.training.fit.suggest import (
    Choice,
    check_window,
    suggest_recipe,
    suggest_refine_recipe,
)
from app.training.fit.warm_start import load_weights
from app.training.options import Options
from app.training.recipe import Recipe
from app.training.record import Record, missing_of, read_record, refuse_finished, seen_by


def train_network(options: Options, console: Console, only_check: bool = False) -> bool:
    """Check the data and train one of a model's networks; False if that was interrupted.

    Raises:
        StartupError: The data are wrong, or the folder holds a checkpoint of another training, or a
            finished model.
        BadParameter: The options do not fit each other, the data or the first network.
        ModelRefused: The folder of the first network, or of the model to start from, is none.
    """
    if options.inner:
        read_manifest(options.folder)  # Before all data are read, which may take minutes.
    if not only_check:
        refuse_finished(options.network_folder)
    plan = plan_network(options, check_and_report(options, console))
    print_choices(console, plan.split, plan.choices)
    return only_check or run(plan, console)


def plan_network(options: Options, checked: CheckedData) -> Plan:
    """Make all choices for one of a model's networks; see ``train_network``."""
    return _plan_second(options, checked) if options.inner else _plan_first(options, checked)


def _plan_first(options: Options, checked: CheckedData) -> Plan:
    record = resumable_record(options.folder)
    chosen = split_as_before(options, checked, record)
    recipe, choices = suggest_recipe(options_as_before(options, record), checked)
    mean = mean_of(chosen.train, checked.names) if recipe.sees == "whole" else None
    return make_plan(options, checked.names, chosen, (recipe, choices), mean)


def _plan_second(options: Options, checked: CheckedData) -> Plan:
    first = read_manifest(options.folder)
    if not first.input.intensity.has_window:
        raise BadParameter(
            "expected a first network trained with --intensity percentile or window, whose bounds "
            f"both networks share, got {first.input.intensity.method}"
        )
    names = tuple(landmark.name for landmark in first.landmarks)
    unknown = set(checked.names) - set(names)
    if unknown:
        raise BadParameter(f"expected landmarks of {first.name}, got also {sorted(unknown)}")
    shape = checked.robust_shape
    if len(names) < MIN_LANDMARKS or (shape is not None and not shape.consistent):
        raise BadParameter(
            f"expected at least {MIN_LANDMARKS} landmarks that keep a constellation, as a pose "
            "follows from that; these are fewer or keep none"
        )
    record = resumable_record(options.network_folder)
    chosen = split_as_before(options, checked, record)
    mean = mean_of(chosen.train, names)
    if mean is None:
        raise BadParameter(
            f"expected a scan with at least {MIN_LANDMARKS} landmarks, as the others' poses follow "
            "from it, got none"
        )
    mean = upright(mean)
    poor = [one.name for one in chosen.train if not has_pose(one.rows(names), mean)]
    if poor:
        raise BadParameter(
            f"expected at least {MIN_COMMON} landmarks that lie in no line in each scan to learn "
            f"from, as its pose follows from them, got fewer in {shorten(poor, LINE_NAMES)}: take "
            "them out of the folder, or name them with --validate"
        )
    if options.start is not None:
        mean = rotate_like(mean, names, options.start)
    # As for the first network; or as before, as it has not always been so.
    options = replace(options, missing=missing_of(record or read_record(options.folder)))
    suggested = suggest_refine_recipe(options_as_before(options, record), checked, first, mean)
    return make_plan(options, names, chosen, suggested, mean)


def run(plan: Plan, console: Console) -> bool:
    """Read the specimens of a plan, and train its network; False if that was interrupted."""
    with _memory_of(plan.options):
        specimens = _read_specimens(plan, console)
        return train(_new_network(plan, console), plan, specimens, console)


def _read_specimens(plan: Plan, console: Console) -> Sequence[Specimen]:
    """Read what a network is trained on: for a second one, in the frame of its mean shape."""
    options, names, recipe = plan.options, plan.record.landmarks, plan.record.recipe
    frame = plan.mean if recipe.sees == "posed" else None
    chosen, coarse_mm = plan.split.train, None
    spacings = [recipe.spacing_mm] * len(chosen)
    if frame is not None:
        # Kept cases and mirror images may have fewer landmarks than the plan's scans.
        chosen = tuple(one for one in chosen if has_pose(one.rows(names), frame))
        # In mm of the subject, as in service: a grid is coarser in one larger than the mean.
        scales = (fit_pose(one.rows(names), frame).scale for one in chosen)
        spacings = [float(scale * recipe.spacing_mm) for scale in scales]
        coarse_mm = min(read_manifest(options.folder).input.spacing_mm)
    files = with_progress([one.files for one in chosen], "Preparing", console)
    specimens: Sequence[Specimen] = [
        load_specimen(one, names, mm, recipe.intensity, recipe.missing, coarse_mm)
        for one, mm in zip(files, spacings, strict=True)
    ]
    if options.mirror:
        mean = mean_of(chosen, names) if frame is None else frame
        specimens = with_mirror_images(specimens, mean)
    if frame is None:
        return specimens
    return [pose_specimen(one, frame) for one in specimens if has_pose(one.points, frame)]


@contextmanager
def _memory_of(options: Options) -> Iterator[None]:
    """Turn what torch and Python raise when memory runs out into an error that says what helps.

    Raises:
        InsufficientMemory: What is done in this context needs more memory than there is.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        shortage = describe_out_of_memory(error, choose_device(options.device))
        raise InsufficientMemory(
            f"expected a training that fits the memory: {shortage}; one of a smaller batch, a "
            "coarser spacing or narrower filters needs less"
        ) from error


def check_and_report(options: Options, console: Console) -> CheckedData:
    """Check the data, print all issues, and refuse data with errors.

    Raises:
        StartupError: There are errors, or warnings with ``--strict``.
    """
    checked = check_data(
        options.scans, options.landmarks, lambda files: with_progress(files, "Checking", console)
    )
    if checked.issues:
        console.print(issue_table(checked.issues))
    console.print(checked.summary(), highlight=False)
    if not checked.may_train(options.strict):
        raise StartupError(f"nothing was trained, because of the data: {checked.summary()}")
    return checked


def with_progress(
    files: Sequence[SpecimenFiles], title: str, console: Console
) -> Iterable[SpecimenFiles]:
    """Pass specimens on, showing a progress bar on a terminal."""
    return track(files, title, console=console, disable=not console.is_terminal, transient=True)


def print_choices(console: Console, chosen: Split, choices: Sequence[Choice]) -> None:
    """Print what was chosen, and why."""
    names = shorten([specimen.name for specimen in chosen.held_out], LINE_NAMES) or "none"
    table = Table("option", "chosen", "why")
    for choice in (Choice("--validate", names, chosen.reason), *choices):
        table.add_row(*astuple(choice))
    console.print(table)


def resumable_record(folder: Path) -> dict[str, Any]:
    """Read the record of a training that can be resumed; empty if there is none."""
    return read_record(folder) if (folder / CHECKPOINT).exists() else {}


def options_as_before(options: Options, record: dict[str, Any]) -> Options:
    """Fill in what the options leave open from the record of the training that is resumed."""
    if not record:
        return options
    with refuse_damaged(options.network_folder / RECORD):
        recipe = record["recipe"]
        return replace(
            options,
            spacing_mm=options.spacing_mm or recipe["spacing_mm"],
            radius_mm=options.radius_mm or recipe["radius_mm"],
            tile=options.tile or (WHOLE if recipe["sees"] == "whole" else recipe["tile_shape"][0]),
            intensity=options.intensity or IntensitySpec(**recipe["intensity"]),
            # Folds are all of one stride, that of the model.
            stride=options.stride if options.folds else recipe["stride"],
            batch=options.batch or recipe["batch"],
            precision=options.precision or recipe.get("precision"),
        )


def split_as_before(options: Options, checked: CheckedData, record: dict[str, Any]) -> Split:
    """Hold out the scans that the options name, or those of the training that is resumed.

    A second network that begins is not trained on those of the first one.
    """
    first = read_record(options.folder) if options.inner else {}
    names, reason = options.hold_out, "given"
    if names is None and (before := record or first):
        there = {specimen.name for specimen in checked.specimens}
        names = tuple(name for name in before.get("held_out", ()) if name in there)
        reason = "as before" if record else "those of the first network"
    chosen = split(checked.specimens, names, reason, options.train_only, options.subject)
    if names is None and options.inner:
        reason = f"{chosen.reason}. The first network may have been trained on them!"
        return replace(chosen, reason=reason)
    return chosen


def make_plan(
    options: Options,
    names: tuple[str, ...],
    chosen: Split,
    suggested: tuple[Recipe, list[Choice]],
    mean: Points | None,
) -> Plan:
    """Put a plan together with its record.

    Raises:
        BadParameter: The window of voxel values shows nothing of some scan.
        ModelRefused: The model could not be written, or that to start from is none.
    """
    recipe, choices = suggested
    check_window(recipe.intensity, [*chosen.train, *chosen.held_out])
    check_exportable(options.network_folder, recipe, names, mean)
    before = read_record(options.start) if options.start else {}
    voxels = {specimen.digest for specimen in chosen.train}
    record = Record(
        recipe=recipe,
        landmarks=names,
        train=tuple(specimen.name for specimen in chosen.train),
        held_out=tuple(specimen.name for specimen in chosen.held_out),
        mirror=options.mirror,
        seen_before=tuple(sorted(seen_by(before))),
        digests=content_digests(chosen.train),
        voxels=tuple(sorted(voxels.union(before.get("voxels", ())))),
        start=read_manifest(options.start).network.sha256 if options.start else None,
    )
    return Plan(options, chosen, tuple(choices), mean, record)


def mean_of(specimens: Sequence[SpecimenSummary], names: Sequence[str]) -> Points | None:
    """Average the specimens' constellations; None if there are too few landmarks for one."""
    rows = [specimen.rows(names) for specimen in specimens]
    if max(int(np.isfinite(points).all(axis=1).sum()) for points in rows) < MIN_LANDMARKS:
        return None
    return mean_shape(rows)


def _new_network(plan: Plan, console: Console) -> nn.Module:
    """Build the network to train, with fresh weights or those of another model, on its device.

    Raises:
        BadParameter: The other model's weights do not fit.
    """
    options, record = plan.options, plan.record
    torch.manual_seed(record.recipe.seed)
    network = build_network(record.recipe, len(record.landmarks))
    if options.start is not None:
        print_warning(load_weights(network, record.landmarks, options.start), console)
    return bring_to(choose_device(options.device), network)
