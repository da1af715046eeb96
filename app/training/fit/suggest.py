"""Options + data -> Recipe: what the options leave open is chosen from the data, with reasons."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from rich.table import Table

from app.compute import MEMORY_SHARE, choose_device, total_memory
from app.errors import BadParameter
from app.geometry import spacing_of
from app.model import InputSpec
from app.training.data.check_data import Checked
from app.training.data.summary import Facts
from app.training.fit.augment import Augmentation
from app.training.options import WHOLE, Options
from app.training.recipe import (
    LEAST_LEVELS,
    NORM_GROUPS,
    PERCENTILES,
    WHOLE_EDGE,
    Recipe,
    network_bytes,
    suggest_spacing,
)

RADIUS_VOXELS: Final = 5.0
"""Default voting radius in voxels of the grid."""

LARGER: Final = 2.0
"""Scans this many times as long as a training image show much that a whole-grid network, which has
seen only the surroundings of the landmarks, would meet for the first time in service."""

LONE_VIEW: Final = 128
"""Voxels along a scan's longest edge, if a single landmark says nothing about a good spacing."""

BATCH: Final = 2

FULL: Final = 0.6
"""Share of the voxels that a service lets a whole scan have, up to which the scans known are fine:
others will be larger."""

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Choice:
    """One number of a recipe.

    Attributes:
        name: What it is, as its option is called.
        value: What was chosen.
        reason: Why.
    """

    name: str
    value: str
    reason: str


def suggest_recipe(options: Options, checked: Checked) -> tuple[Recipe, list[Choice]]:
    """Fill in what the options leave open.

    Args:
        options: What was asked for.
        checked: The data.

    Returns:
        The recipe, and the reason for each choice.

    Raises:
        BadParameter: The options make no network.
    """
    spacing, spacing_choice = _spacing(options, checked)
    tile, tile_choice = _tile(options, checked, spacing)
    whole = tile == WHOLE
    radius = options.radius_mm or RADIUS_VOXELS * spacing
    edge = WHOLE_EDGE if tile == WHOLE else int(tile)
    recipe = base_recipe(options, spacing, radius)
    recipe = replace(
        recipe,
        tile_shape=(edge, edge, edge),
        sees="whole" if whole else "tiles",
        augmentation=Augmentation(
            rotation_deg=options.rotation_deg, place="middle" if whole else "anywhere"
        ),
    )
    if not whole and edge % recipe.divisor:
        raise BadParameter(f"--tile: expected a multiple of {recipe.divisor} voxels, got {edge}")
    recipe, batch_choice = fit_memory(options, recipe, checked)
    return recipe, [spacing_choice, radius_choice(options, recipe), tile_choice, batch_choice]


def base_recipe(options: Options, spacing_mm: float, radius_mm: float) -> Recipe:
    """Make the part of a recipe that the options alone decide.

    Raises:
        BadParameter: No network has such filters.
    """
    filters = options.filters
    if len(filters) < LEAST_LEVELS or any(width % NORM_GROUPS or not width for width in filters):
        raise BadParameter(
            f"--filters: expected at least {LEAST_LEVELS} multiples of {NORM_GROUPS}, "
            f"got {', '.join(map(str, filters))}"
        )
    return Recipe(
        spacing_mm=spacing_mm,
        radius_mm=radius_mm,
        stride=options.stride,
        filters=filters,
        steps=options.schedule.steps,
        batch=options.schedule.batch or BATCH,
        rate=options.schedule.rate,
        seed=options.schedule.seed,
        missing=options.missing,
        intensity=options.intensity or PERCENTILES,
        cuts=options.cuts,
    )


def radius_choice(options: Options, recipe: Recipe) -> Choice:
    """Say why a radius was chosen."""
    reason = "given" if options.radius_mm else f"{RADIUS_VOXELS:g} voxels of the grid"
    return Choice("--radius", f"{recipe.radius_mm:.3g} mm", reason)


def finest_mm(specimens: Sequence[Facts]) -> float:
    """Find the finest spacing of a typical scan, in mm."""
    return float(np.median([spacing_of(facts.affine).min() for facts in specimens]))


def fit_memory(options: Options, recipe: Recipe, checked: Checked) -> tuple[Recipe, Choice]:
    """Choose how many images a step has, and say what that takes."""
    device = choose_device(options.device)
    memory = total_memory(device)
    scans = 4 * sum(float(np.prod(facts.shape)) for facts in checked.specimens)
    room = MEMORY_SHARE * memory - (scans if device.type == "cpu" else 0.0)

    def need(batch: int) -> float:
        return network_bytes(replace(recipe, batch=batch), len(checked.names))

    reason = "given"
    if options.schedule.batch is None:
        recipe = replace(recipe, batch=BATCH if need(BATCH) <= room else 1)
        reason = "as recipes here were tried with" if recipe.batch == BATCH else "more do not fit"
    told = (
        f"{reason}; about {need(recipe.batch) / GIB:.1f} GiB, and {scans / GIB:.1f} for the scans"
    )
    if need(recipe.batch) > room:
        told += (
            f": more than {MEMORY_SHARE:.0%} of the {memory / GIB:.0f} GiB of {device}; "
            "take a coarser --spacing, a smaller --tile, or --filters 16,32,64"
        )
    return recipe, Choice("--batch", str(recipe.batch), told)


def table_of(choices: Sequence[Choice]) -> Table:
    """Lay choices out with their reasons."""
    table = Table("option", "chosen", "why")
    for choice in choices:
        table.add_row(choice.name, choice.value, choice.reason)
    return table


def _spacing(options: Options, checked: Checked) -> tuple[float, Choice]:
    """Choose the spacing of the grid."""

    def chosen(spacing: float, reason: str) -> tuple[float, Choice]:
        return spacing, Choice("--spacing", f"{spacing:g} mm", reason)

    if options.spacing_mm is not None:
        return chosen(options.spacing_mm, "given")
    point_sets = [facts.placed for facts in checked.specimens if len(facts.points) > 1]
    finest = float(f"{finest_mm(checked.specimens):.2g}")
    if not point_sets:
        longest = max(float(facts.extent_mm.max()) for facts in checked.specimens)
        spacing = max(finest, float(f"{longest / LONE_VIEW:.2g}"))
        return chosen(spacing, f"a scan is then at most {LONE_VIEW} voxels long")
    spacing = suggest_spacing(point_sets)
    if spacing < finest:
        return chosen(finest, "that of the scans: the landmarks lie close together")
    span = spacing * WHOLE_EDGE
    return chosen(
        spacing, f"the landmarks span about {span:.3g} mm, a training image {WHOLE_EDGE} voxels"
    )


def _tile(options: Options, checked: Checked, spacing: float) -> tuple[int | str, Choice]:
    """Choose whether the network sees scans whole."""

    def chosen(tile: int | str, reason: str) -> tuple[int | str, Choice]:
        return tile, Choice("--tile", str(tile), reason)

    if options.tile is not None:
        return chosen(options.tile, "given")
    if checked.typical is not None and checked.typical.loose:
        return chosen(
            WHOLE_EDGE, "the landmarks keep no constellation, so each is looked for alone"
        )
    extents = np.stack([facts.extent_mm for facts in checked.specimens])
    longer = float(np.median(extents.max(axis=1))) / (spacing * WHOLE_EDGE)
    if longer > LARGER:
        reason = f"the scans are {longer:.2g} times as long as what the landmarks take up"
        return chosen(WHOLE_EDGE, reason)
    voxels = float((extents / spacing).prod(axis=1).max())
    most = int(InputSpec.model_fields["max_voxels"].default)
    if voxels > FULL * most:
        return chosen(WHOLE_EDGE, f"a scan has {voxels / 1e6:.0f} million voxels of the grid")
    apart = "" if checked.typical is None else ", and their constellation tells them apart"
    return chosen(WHOLE, f"a training image shows most of a scan{apart}")
