"""Options -> a model folder: the data checked, choices made from them, and a network trained."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from app.compute import choose_device
from app.errors import BadParameter, StartupError
from app.geometry import Points
from app.model import IntensitySpec
from app.training.data import issues as findings
from app.training.data.check_data import Checked, Pair, check_data
from app.training.data.issues import listed
from app.training.data.specimens import Specimen, load_specimen
from app.training.data.split import Split, split
from app.training.data.summary import Facts
from app.training.data.symmetry import with_mirror_images
from app.training.files import CHECKPOINT
from app.training.fit.checkpoint import Record, read_record
from app.training.fit.loop import Data, Place, train
from app.training.fit.suggest import Choice, suggest_recipe, table_of
from app.training.fit.warm_start import take_over
from app.training.options import WHOLE, Options, read_tile
from app.training.recipe import Recipe, build_network
from app.voting import MIN_LANDMARKS, mean_shape


@dataclass(frozen=True, slots=True)
class Plan:
    """What a training will be, all choices made.

    Attributes:
        folder: The model folder of the network that is trained.
        names: Of the landmarks.
        chosen: Who is learned from.
        recipe: Every number.
        choices: The reasons for those that the options left open.
        mean: Mean shape of those who are learned from; None if the network keeps none.
        record: What the training is begun with.
    """

    folder: Path
    names: tuple[str, ...]
    chosen: Split
    recipe: Recipe
    choices: tuple[Choice, ...]
    mean: Points | None
    record: Record


def train_first(options: Options, console: Console, only_check: bool = False) -> bool:
    """Train the network of a model that sees scans as they come.

    Args:
        options: What was asked for.
        console: What to report to.
        only_check: Whether to stop before training.

    Returns:
        Whether all was done that was asked for; False if somebody interrupted it.

    Raises:
        StartupError: The data are wrong, or the folder holds a checkpoint of another training.
        BadParameter: The options do not fit each other or the data.
    """
    plan = plan_first(options, look_through(options, console))
    show(console, plan.chosen, plan.choices)
    return only_check or run_first(options, plan, console)


def plan_first(options: Options, checked: Checked) -> Plan:
    """Make all choices of a training; see ``train_first``."""
    record = read_record(options.folder) if (options.folder / CHECKPOINT).exists() else None
    chosen = split_as_begun(options, checked, record)
    recipe, choices = suggest_recipe(as_begun(options, record), checked)
    names = checked.names
    mean = mean_of(chosen.train, names) if recipe.sees == "whole" else None
    record_now = record_of(options, recipe, names, chosen)
    return Plan(options.folder, names, chosen, recipe, tuple(choices), mean, record_now)


def run_first(options: Options, plan: Plan, console: Console) -> bool:
    """Read the specimens of a plan, and train; see ``train_first``."""
    names, recipe, chosen = plan.names, plan.recipe, plan.chosen
    pairs = [facts.pair for facts in chosen.train]
    specimens: Sequence[Specimen] = [
        load_specimen(pair, names, recipe.spacing_mm, recipe.intensity)
        for pair in watched(pairs, "Preparing", console)
    ]
    if options.mirror:
        specimens = mirrored(specimens, mean_of(chosen.train, names))
    held_out = tuple(facts.pair for facts in chosen.held_out)
    data = Data(names, plan.mean, tuple(specimens), held_out)
    network = new_network(options, recipe, names, console)
    place = Place(plan.folder, choose_device(options.device), console)
    return train(network, data, plan.record, place)


def look_through(options: Options, console: Console) -> Checked:
    """Check the data, tell all that is found, and refuse wrong ones.

    Raises:
        StartupError: There is something wrong.
    """
    checked = check_data(
        options.scans, options.landmarks, lambda pairs: watched(pairs, "Checking", console)
    )
    if checked.findings:
        console.print(findings.table_of(checked.findings))
    console.print(checked.summary(), highlight=False)
    if not checked.may_train(options.strict):
        raise StartupError(f"nothing was trained, because of the data: {checked.summary()}")
    return checked


def watched(pairs: Sequence[Pair], what: str, console: Console) -> Iterable[Pair]:
    """Pass pairs on, showing on a terminal how far it is."""
    return track(pairs, what, console=console, disable=not console.is_terminal, transient=True)


def as_begun(options: Options, record: dict[str, Any] | None) -> Options:
    """Take what the options leave open from the training that goes on; of a new one, nothing."""
    if record is None:
        return options
    recipe = record["recipe"]
    edge = str(recipe["tile_shape"][0])
    tile = read_tile(WHOLE if recipe["sees"] == "whole" else edge)
    return replace(
        options,
        spacing_mm=options.spacing_mm or recipe["spacing_mm"],
        radius_mm=options.radius_mm or recipe["radius_mm"],
        tile=options.tile or tile,
        intensity=options.intensity or IntensitySpec(**recipe["intensity"]),
        schedule=replace(options.schedule, batch=options.schedule.batch or recipe["batch"]),
    )


def split_as_begun(options: Options, checked: Checked, record: dict[str, Any] | None) -> Split:
    """Hold out the scans that were named, or else those of the training that goes on."""
    if options.hold_out is not None:
        return split(checked.specimens, options.hold_out, "given", options.train_only)
    if record is not None:
        there = {facts.name for facts in checked.specimens}
        names = [name for name in record["held_out"] if name in there]
        return split(checked.specimens, names, "as before")
    return split(checked.specimens, None, train_only=options.train_only)


def show(console: Console, chosen: Split, choices: Sequence[Choice]) -> None:
    """Show what was chosen, and why."""
    names = listed([facts.name for facts in chosen.held_out], most=8) or "none"
    console.print(table_of([Choice("--validate", names, chosen.reason), *choices]))


def mean_of(specimens: Sequence[Facts], names: Sequence[str]) -> Points | None:
    """Average the specimens' constellations; None if landmarks are too few to make one."""
    if len(names) < MIN_LANDMARKS:
        return None
    return mean_shape([facts.rows(names) for facts in specimens])


def mirrored(specimens: Sequence[Specimen], mean: Points | None) -> Sequence[Specimen]:
    """Add the mirror image of every specimen.

    Raises:
        BadParameter: The landmarks have no symmetry.
    """
    if mean is None:
        raise BadParameter(f"--mirror: expected at least {MIN_LANDMARKS} landmarks, got fewer")
    try:
        return with_mirror_images(specimens, mean)
    except ValueError as error:
        raise BadParameter(f"--mirror: {error}") from None


def new_network(
    options: Options, recipe: Recipe, names: Sequence[str], console: Console
) -> nn.Module:
    """Build the network to train, with fresh weights or those of another model.

    Landmarks that only one of the two has are told.

    Raises:
        BadParameter: The other model's weights do not fit.
    """
    torch.manual_seed(recipe.seed)
    network = build_network(recipe, len(names))
    if options.start is not None:
        told = take_over(network, names, options.start)
        if told:
            console.print(told, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return network


def record_of(options: Options, recipe: Recipe, names: Sequence[str], chosen: Split) -> Record:
    """Say what a training is begun with."""
    return Record(
        recipe=recipe,
        landmarks=tuple(names),
        train=tuple(facts.name for facts in chosen.train),
        held_out=tuple(facts.name for facts in chosen.held_out),
        mirror=options.mirror,
    )
