"""Options -> the second network of a model: it looks again, closer, in the pose of the first.

It lies in the folder ``refine`` within the first model's, whose ``model.toml`` names it. Scans are
turned into the frame of the landmarks' mean shape, and from there by as little as a first model may
be wrong about a pose; so what is left to learn is small, and is learned at a finer spacing.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from app.compute import choose_device
from app.errors import BadParameter, ModelRefused
from app.geometry import Points, transform
from app.inference import pose_of
from app.model import Manifest, load_shape, read_manifest
from app.training.data.check_data import Checked
from app.training.data.specimens import Specimen, load_specimen
from app.training.data.split import Split, split
from app.training.files import CHECKPOINT
from app.training.fit.augment import Augmentation
from app.training.fit.checkpoint import read_record
from app.training.fit.loop import Data, Place, train
from app.training.fit.suggest import (
    RADIUS_VOXELS,
    Choice,
    base_recipe,
    finest_mm,
    fit_memory,
    radius_choice,
)
from app.training.options import Options
from app.training.pipeline import (
    Plan,
    as_begun,
    look_through,
    mirrored,
    new_network,
    record_of,
    show,
    split_as_begun,
    watched,
)
from app.training.recipe import Recipe
from app.voting import MIN_LANDMARKS, fit_similarity, mean_shape

FOLDER: Final = "refine"

MARGIN: Final = 0.065
"""Around the mean shape, as a share of its diagonal: subjects differ, and context helps."""

POSE_ERRORS: Final = Augmentation(
    rotation_deg=8.0, scale=0.04, stretch=0.03, shift_mm=0.4, elastic_mm=0.15, crop=0.03
)
"""A first model is off by a degree or two and a few tenths of a millimetre; these are more."""


FINER: Final = 0.6
"""Default spacing, in spacings of the first network; the mouse skull's two are 0.42 and 0.25 mm."""


def train_refine(options: Options, console: Console, only_check: bool = False) -> bool:
    """Train the second network of a model.

    Args:
        options: What was asked for; the folder is that of the first model.
        console: What to report to.
        only_check: Whether to stop before training.

    Returns:
        Whether all was done that was asked for; False if somebody interrupted it.

    Raises:
        StartupError: The data are wrong, or the folder holds a checkpoint of another training.
        BadParameter: The options do not fit each other, the data or the first model.
        ModelRefused: The first model's folder is none.
    """
    read_manifest(options.folder)  # A first model that is none is said before all data are read.
    plan = plan_refine(options, look_through(options, console))
    show(console, plan.chosen, plan.choices)
    return only_check or run_refine(options, plan, console)


def plan_refine(options: Options, checked: Checked) -> Plan:
    """Make all choices of a training; see ``train_refine``."""
    first = read_manifest(options.folder)
    names = tuple(landmark.name for landmark in first.landmarks)
    folder = options.folder / FOLDER
    unknown = set(checked.names) - set(names)
    if unknown:
        raise BadParameter(f"expected landmarks of {first.name}, got also {sorted(unknown)}")
    if len(names) < MIN_LANDMARKS or (checked.typical is not None and checked.typical.loose):
        raise BadParameter(
            f"expected at least {MIN_LANDMARKS} landmarks that keep a constellation, as a pose "
            "follows from that; these are fewer or lie anyhow"
        )
    record = read_record(folder) if (folder / CHECKPOINT).exists() else None
    chosen = _split(options, checked, record)
    mean = upright(mean_shape([facts.rows(names) for facts in chosen.train]))
    if options.start is not None:
        mean = turned_as(mean, names, options.start)
    recipe, choices = _recipe(as_begun(options, record), checked, first, mean)
    record_now = record_of(options, recipe, names, chosen)
    return Plan(folder, names, chosen, recipe, tuple(choices), mean, record_now)


def run_refine(options: Options, plan: Plan, console: Console) -> bool:
    """Read the specimens of a plan, pose them, and train; see ``train_refine``."""
    first, recipe, chosen = read_manifest(options.folder), plan.recipe, plan.chosen
    names, mean = plan.names, plan.mean
    if mean is None:
        raise ValueError("expected a plan with a mean shape, got none")
    coarse_mm = min(first.input.spacing_mm)
    pairs = [facts.pair for facts in chosen.train]
    specimens: Sequence[Specimen] = [
        load_specimen(pair, names, recipe.spacing_mm, first.input.intensity, coarse_mm)
        for pair in watched(pairs, "Preparing", console)
    ]
    if options.mirror:
        specimens = mirrored(specimens, mean)
    posed = tuple(pose_specimen(specimen, mean) for specimen in specimens)
    data = Data(names, mean, posed, tuple(facts.pair for facts in chosen.held_out))
    network = new_network(options, recipe, names, console)
    place = Place(plan.folder, choose_device(options.device), console)
    return train(network, data, plan.record, place)


def _split(options: Options, checked: Checked, record: dict[str, Any] | None) -> Split:
    """Hold out whom the first network has not seen either, unless others are named."""
    begun = read_record(options.folder)
    if options.hold_out is None and record is None and begun is not None:
        there = {facts.name for facts in checked.specimens}
        names = [name for name in begun["held_out"] if name in there]
        return split(checked.specimens, names, "those that the first network has not seen")
    chosen = split_as_begun(options, checked, record)
    if options.hold_out is None and record is None:
        # Nothing tells whom the first network was trained on.
        return replace(chosen, reason=f"{chosen.reason}. The first network may have seen them!")
    return chosen


def _recipe(
    options: Options, checked: Checked, first: Manifest, mean: Points
) -> tuple[Recipe, list[Choice]]:
    """Fill in what the options leave open from the first model and the mean shape."""
    spacing, reason = options.spacing_mm, "given"
    if spacing is None:
        finest = float(f"{finest_mm(checked.specimens):.2g}")
        finer = float(f"{FINER * min(first.input.spacing_mm):.2g}")
        spacing = max(finest, finer)
        reason = (
            "that of the scans" if spacing > finer else f"{FINER:g} times that of the first network"
        )
    recipe = base_recipe(options, spacing, options.radius_mm or RADIUS_VOXELS * spacing)
    margin = MARGIN * float(np.linalg.norm(np.nanmax(mean, axis=0) - np.nanmin(mean, axis=0)))
    half = np.nanmax(np.abs(mean), axis=0) + margin
    edges = -(-2 * half / spacing // recipe.divisor).astype(int) * recipe.divisor
    i, j, k = edges.tolist()
    recipe = replace(
        recipe,
        sees="posed",
        tile_shape=(i, j, k),
        augmentation=POSE_ERRORS,
        intensity=first.input.intensity,
    )
    recipe, batch = fit_memory(options, recipe, checked)
    return recipe, [
        Choice("--spacing", f"{spacing:g} mm", reason),
        radius_choice(options, recipe),
        batch,
    ]


def upright(mean: Points) -> Points:
    """Turn a mean shape so that the box around it is small: its principal axes become i, j, k."""
    known = mean[np.isfinite(mean).all(axis=1)]
    _, _, axes = np.linalg.svd(known - known.mean(axis=0), full_matrices=False)
    return np.asarray(mean @ (axes * np.sign(np.linalg.det(axes))).T)


def turned_as(mean: Points, names: Sequence[str], start: Path) -> Points:
    """Turn a mean shape as that of the second network whose weights a training starts from.

    These know the subject in one pose only. Principal axes have two directions each, and which of
    them ``upright`` takes depends on the specimens.

    Args:
        mean: The mean shape, around the origin.
        names: Of its landmarks.
        start: Folder of the network; one that has no such pose turns nothing.

    Returns:
        The mean shape in that pose.

    Raises:
        BadParameter: There is no such model.
    """
    try:
        manifest = read_manifest(start)
        theirs = load_shape(start, manifest)
    except ModelRefused as error:
        raise BadParameter(f"--start: expected a model, got: {error}") from None
    if theirs is None or manifest.input.tile_shape == "whole":
        return mean
    place = {landmark.name: row for row, landmark in enumerate(manifest.landmarks)}
    target = np.array([theirs[place[name]] if name in place else [np.nan] * 3 for name in names])
    known = np.isfinite(mean).all(axis=1) & np.isfinite(target).all(axis=1)
    if known.sum() < MIN_LANDMARKS:
        return mean
    fit = fit_similarity(mean[known], target[known], np.ones(int(known.sum())))
    return np.asarray(mean @ fit.rotation.T)


def pose_specimen(specimen: Specimen, mean: Points) -> Specimen:
    """Bring a specimen into the frame of the mean shape, by its own landmarks."""
    known = np.isfinite(specimen.points).all(axis=1) & np.isfinite(mean).all(axis=1)
    fit = fit_similarity(mean[known], specimen.points[known], np.ones(int(known.sum())))
    to_frame = np.linalg.inv(pose_of(fit).to_world)
    return replace(
        specimen,
        to_world=to_frame @ specimen.to_world,
        points=transform(to_frame, specimen.points),
    )
