"""Options + data -> Recipe: what the options leave open is chosen from the data, with reasons."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from app.compute import MEMORY_SHARE, choose_device, fast_precisions, total_memory
from app.errors import BadParameter
from app.geometry import Points, PointSet, spacing_of
from app.model import WHOLE, InputSpec, IntensitySpec, Manifest
from app.training.data.check_data import CheckedData
from app.training.data.issues import shorten
from app.training.data.summary import SpecimenSummary
from app.training.fit.network import MIN_LEVELS, NORM_GROUPS, training_bytes
from app.training.options import Options, Precision
from app.training.recipe import PERCENTILES, WHOLE_EDGE, Augmentation, Recipe

RADIUS_VOXELS: Final = 5.0
"""Default voting radius in voxels of the grid."""

VIEW_MARGIN: Final = 1.03
"""A training image is this much longer than the diagonal of the landmarks' bounding box."""

MAX_WHOLE_LENGTH: Final = 2.0
"""Scans that are longer than so many training images show much that a whole-grid network, which is
trained on the surroundings of the landmarks, would meet for the first time in service."""

MAX_WHOLE_SHARE: Final = 0.6
"""Of the voxels that the service allows for a whole scan: other scans will be larger than these."""

SINGLE_LANDMARK_EDGE: Final = 128
"""Voxels along a scan's longest edge, if a single landmark says nothing about a good spacing."""

BATCH: Final = 2

REFINE_SPACING: Final = 0.6
"""Default spacing of a second network, in spacings of the first; the mouse skull's two are 0.42 and
0.25 mm."""

REFINE_MARGIN: Final = 0.065
"""Around the mean shape, as a share of its diagonal: subjects differ, and context helps."""

SHIFT_VOXELS: Final = 3.5
ELASTIC_VOXELS: Final = 0.36
"""Default shift and elastic deformation for a first network, in voxels of its grid."""

POSE_ERRORS: Final = Augmentation(rotation_deg=8.0, scale=0.04, stretch=0.03, crop=0.03)
"""A first network is off by a degree or two; these are more."""

REFINE_ASPECT: Final = 0.25
"""Least edge of its tile over the longest one: all landmarks may lie in a plane."""

POSE_SHIFT_VOXELS: Final = 1.6
POSE_ELASTIC_VOXELS: Final = 0.6
"""Likewise in voxels of a second network's grid: a first one is off by a few tenths of these."""

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for an option, and why, for the table of choices."""

    name: str
    value: str
    reason: str


def suggest_recipe(options: Options, checked: CheckedData) -> tuple[Recipe, list[Choice]]:
    """Choose whatever the options leave open for a first network.

    Returns:
        The recipe, and the reason for each choice.

    Raises:
        BadParameter: The options make no network.
    """
    spacing, why_spacing = _choose_spacing(options, checked)
    tile, why_tile = _choose_tile(options, checked, spacing)
    whole = tile == WHOLE
    recipe = replace(
        _base_recipe(options, spacing),
        sees="whole" if whole else "tiles",
        augmentation=replace(
            Augmentation(
                shift_mm=SHIFT_VOXELS * spacing,
                elastic_mm=ELASTIC_VOXELS * spacing,
                place="middle" if whole else "anywhere",
            ),
            **options.augmentation,
        ),
    )
    if whole:
        recipe = replace(recipe, tile_shape=_whole_shape(recipe, checked.specimens))
    else:
        edge = int(tile)
        if recipe.augmentation.field > 1.0:
            raise BadParameter("--field: expected a network that sees scans whole, got tiles")
        if edge % recipe.divisor:
            raise BadParameter(
                f"--tile: expected a multiple of {recipe.divisor} voxels, got {edge}"
            )
        recipe = replace(recipe, tile_shape=(edge, edge, edge))
    recipe, batch_choice = _fit_memory(options, recipe, checked)
    return recipe, [
        Choice("--spacing", f"{spacing:g} mm", why_spacing),
        _radius_choice(options, recipe),
        Choice("--tile", str(tile), why_tile),
        batch_choice,
        _precision_choice(options, recipe),
    ]


def suggest_refine_recipe(
    options: Options, checked: CheckedData, first: Manifest, mean: Points
) -> tuple[Recipe, list[Choice]]:
    """Choose whatever the options leave open for a second network, of an upright mean shape in mm.

    Returns:
        The recipe, and the reason for each choice.

    Raises:
        BadParameter: The options make no network.
    """
    spacing, reason = options.spacing_mm, "given"
    if spacing is None:
        finest = _two_digits(_finest_mm(checked.specimens))
        finer = _two_digits(REFINE_SPACING * min(first.input.spacing_mm))
        spacing = max(finest, finer)
        reason = (
            "that of the scans"
            if spacing > finer
            else f"{REFINE_SPACING:g} times that of the first network"
        )
    recipe = _base_recipe(options, spacing)
    diagonal = float(np.linalg.norm(np.nanmax(mean, axis=0) - np.nanmin(mean, axis=0)))
    half = np.nanmax(np.abs(mean), axis=0) + REFINE_MARGIN * diagonal
    half = np.maximum(half, REFINE_ASPECT * half.max())
    edges = -(-2 * half / spacing // recipe.divisor).astype(int) * recipe.divisor
    i, j, k = edges.tolist()
    recipe = replace(
        recipe,
        sees="posed",
        tile_shape=(i, j, k),
        augmentation=replace(
            POSE_ERRORS,
            **{
                "shift_mm": POSE_SHIFT_VOXELS * spacing,
                "elastic_mm": POSE_ELASTIC_VOXELS * spacing,
                **options.augmentation,
            },
        ),
        intensity=first.input.intensity,
    )
    recipe, batch_choice = _fit_memory(options, recipe, checked)
    return recipe, [
        Choice("--spacing", f"{spacing:g} mm", reason),
        _radius_choice(options, recipe),
        batch_choice,
        _precision_choice(options, recipe),
    ]


def suggest_spacing(point_sets: Sequence[PointSet]) -> float:
    """Choose a spacing at which the landmarks of a typical specimen fit an image in any pose.

    Args:
        point_sets: Landmarks of every specimen, in mm, NaN where missing.

    Returns:
        The median diagonal of the landmarks' bounding boxes over the edge of a training image, in
        mm, rounded to two significant digits.
    """
    diagonals = [
        np.linalg.norm(np.nanmax(points, axis=0) - np.nanmin(points, axis=0))
        for points in point_sets
    ]
    return _two_digits(VIEW_MARGIN * float(np.median(diagonals)) / WHOLE_EDGE)


def check_window(intensity: IntensitySpec, specimens: Sequence[SpecimenSummary]) -> None:
    """Check that a given window of voxel values leaves something to see of each scan.

    Raises:
        BadParameter: All voxels of a scan lie below it, or all above, and would be 0 or 1.
    """
    if intensity.method != "window":
        return
    lower, upper = intensity.lower, intensity.upper
    blank = [one for one in specimens if one.extremes[1] <= lower or upper <= one.extremes[0]]
    if blank:
        low, high = blank[0].extremes
        raise BadParameter(
            "expected an intensity window that the values of each scan reach, got "
            f"{lower:g} to {upper:g}, and none within in {shorten([one.name for one in blank])}: "
            f"those of {blank[0].name} are {low:.4g} to {high:.4g}"
        )


def _base_recipe(options: Options, spacing_mm: float) -> Recipe:
    """Fill in the fields that the options alone decide."""
    filters = options.filters
    if len(filters) < MIN_LEVELS or any(width % NORM_GROUPS or not width for width in filters):
        raise BadParameter(
            f"--filters: expected at least {MIN_LEVELS} multiples of {NORM_GROUPS}, "
            f"got {', '.join(map(str, filters))}"
        )
    default: Precision = "bfloat16" if choose_device(options.device).type == "cuda" else "float32"
    return Recipe(
        spacing_mm=spacing_mm,
        radius_mm=options.radius_mm or RADIUS_VOXELS * spacing_mm,
        stride=options.stride,
        filters=filters,
        steps=options.steps,
        batch=options.batch or BATCH,
        rate=options.rate,
        seed=options.seed,
        precision=options.precision or default,
        missing=options.missing,
        intensity=options.intensity or PERCENTILES,
        cuts=options.cuts,
    )


def _whole_shape(recipe: Recipe, specimens: Sequence[SpecimenSummary]) -> tuple[int, int, int]:
    """Choose the shape of training images for a network that sees scans whole.

    Scans that come in any orientation fit into a cube; those that stay upright keep the proportions
    of a typical one, in no more voxels.
    """
    if not recipe.is_upright:
        edge = -(-WHOLE_EDGE // recipe.divisor) * recipe.divisor
        return (edge, edge, edge)
    extents = [np.abs(one.affine[:3, :3]) @ np.asarray(one.shape) for one in specimens]
    edges = np.median(extents, axis=0) / recipe.spacing_mm
    edges *= min(1.0, WHOLE_EDGE / float(np.prod(edges)) ** (1 / 3))
    i, j, k = (-(-edges // recipe.divisor).astype(int) * recipe.divisor).tolist()
    return (i, j, k)


def _radius_choice(options: Options, recipe: Recipe) -> Choice:
    reason = "given" if options.radius_mm else f"{RADIUS_VOXELS:g} voxels of the grid"
    return Choice("--radius", f"{recipe.radius_mm:.3g} mm", reason)


def _precision_choice(options: Options, recipe: Recipe) -> Choice:
    reason = "given" if options.precision else "the default"
    device = choose_device(options.device)
    is_fast = "bfloat16" in fast_precisions(device)
    if recipe.precision == "bfloat16" and not is_fast:
        reason += f", but {device} has no instructions for it: float32 is many times as fast here"
    elif recipe.precision == "float32" and is_fast:
        reason += "; in bfloat16 a step takes a third less time here"
    return Choice("--precision", recipe.precision, reason)


def _fit_memory(options: Options, recipe: Recipe, checked: CheckedData) -> tuple[Recipe, Choice]:
    """Choose the batch size by the memory that it takes."""
    device = choose_device(options.device)
    memory = total_memory(device)
    scans = 4 * sum(float(np.prod(specimen.shape)) for specimen in checked.specimens)
    available = MEMORY_SHARE * memory - (scans if device.type == "cpu" else 0.0)
    each = training_bytes(recipe, len(checked.names))
    reason = "given"
    if options.batch is None:
        recipe = replace(recipe, batch=BATCH if BATCH * each <= available else 1)
        reason = "the default" if recipe.batch == BATCH else "more do not fit"
    _check_norms(recipe)
    need = recipe.batch * each
    reason += f"; about {need / GIB:.1f} GiB, and {scans / GIB:.1f} for the scans"
    if need > available:
        reason += (
            f": more than {MEMORY_SHARE:.0%} of the {memory / GIB:.0f} GiB of {device}; "
            "take a coarser --spacing, a smaller --tile, or --filters 16,32,64"
        )
    return recipe, Choice("--batch", str(recipe.batch), reason)


def _check_norms(recipe: Recipe) -> None:
    """Check that norms see several values in each group, as torch refuses to train on a single one.

    Raises:
        BadParameter: They would see one at the coarsest level.
    """
    voxels = math.prod(edge // recipe.divisor for edge in recipe.tile_shape)
    if recipe.batch * voxels * recipe.filters[-1] == NORM_GROUPS:
        raise BadParameter(
            "--batch: expected 2 or more, as an image has one voxel at the coarsest level, of "
            f"{NORM_GROUPS} channels; got 1: take that, a larger image, or wider or fewer --filters"
        )


def _choose_spacing(options: Options, checked: CheckedData) -> tuple[float, str]:
    """Choose the spacing of the grid, and say why."""
    if options.spacing_mm is not None:
        return options.spacing_mm, "given"
    point_sets = [one.positions for one in checked.specimens if len(one.points) > 1]
    finest = _two_digits(_finest_mm(checked.specimens))
    if not point_sets:
        longest = max(float(specimen.extent_mm.max()) for specimen in checked.specimens)
        spacing = max(finest, _two_digits(longest / SINGLE_LANDMARK_EDGE))
        return spacing, f"a scan is then at most {SINGLE_LANDMARK_EDGE} voxels long"
    spacing = suggest_spacing(point_sets)
    if spacing < finest:
        return finest, "that of the scans: the landmarks lie close together"
    span = f"{spacing * WHOLE_EDGE:.3g} mm"
    return spacing, f"the landmarks span about {span}, a training image {WHOLE_EDGE} voxels"


def _choose_tile(options: Options, checked: CheckedData, spacing: float) -> tuple[int | str, str]:
    """Choose whether the network sees scans whole, or the edge of its tiles, and say why."""
    if options.tile is not None:
        return options.tile, "given"
    if checked.robust_shape is not None and not checked.robust_shape.consistent:
        return WHOLE_EDGE, "the landmarks keep no constellation, so each is looked for alone"
    extents = np.stack([specimen.extent_mm for specimen in checked.specimens])
    length = float(np.median(extents.max(axis=1))) / (spacing * WHOLE_EDGE)
    if length > MAX_WHOLE_LENGTH:
        reason = f"the scans are {length:.2g} times as long as what the landmarks take up"
        return WHOLE_EDGE, reason
    voxels = float((extents / spacing).prod(axis=1).max())
    if voxels > MAX_WHOLE_SHARE * int(InputSpec.model_fields["max_voxels"].default):
        return WHOLE_EDGE, f"a scan has {voxels / 1e6:.0f} million voxels of the grid"
    distinct = "" if checked.robust_shape is None else ", and their constellation tells them apart"
    return WHOLE, f"a training image shows most of a scan{distinct}"


def _finest_mm(specimens: Sequence[SpecimenSummary]) -> float:
    """Return the finest spacing of a typical scan, in mm."""
    return float(np.median([spacing_of(specimen.affine).min() for specimen in specimens]))


def _two_digits(number: float) -> float:
    return float(f"{number:.2g}")
