"""Train the second network of a model: it looks again, closer, in the pose that the first finds.

    python -m models.train_refine SCANS LANDMARKS --model models/NAME

writes ``models/NAME/refine`` and names it in ``models/NAME/model.toml``. Scans are turned into the
frame of the landmarks' mean shape, and from there by as little as a first model may be wrong about
a pose; so what is left to learn is small, and is learned at a finer spacing.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_model

from app.constellation import fit_similarity, mean_shape
from app.device import choose_device
from app.frames import Points, transform
from app.manifest import read_manifest
from app.posed import pose_of
from models.augment import Augmentation
from models.recipe import LEAST_LEVELS, NORM_GROUPS, Recipe, build_network
from models.specimens import Specimen, landmark_names, load_specimen, pair_files, read_points
from models.symmetry import with_mirror_images
from models.train import RADIUS_VOXELS, Data, train

FOLDER: Final = "refine"

MARGIN: Final = 0.065
"""Around the mean shape, as a share of its diagonal: subjects differ, and context helps."""

POSE_ERRORS: Final = Augmentation(
    rotation_deg=8.0, scale=0.04, stretch=0.03, shift_mm=0.4, elastic_mm=0.15, crop=0.03
)
"""A first model is off by a degree or two and a few tenths of a millimetre; these are more."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = make_parser().parse_args(arguments)
    console = Console()
    first = read_manifest(options.model)
    names = [landmark.name for landmark in first.landmarks]
    pairs = pair_files(options.scans, options.landmarks)
    unknown = (set(options.validate) - {pair[0] for pair in pairs}) | (
        set(landmark_names(pairs)) - set(names)
    )
    if unknown:
        raise SystemExit(
            f"expected scans that are there and known landmarks, got {sorted(unknown)}"
        )
    held = [pair for pair in pairs if pair[0] in options.validate]
    trained = [pair for pair in pairs if pair[0] not in options.validate]
    mean = upright(mean_shape([read_points(pair, names) for pair in trained]))
    recipe = make_recipe(options, mean)
    console.print(recipe)
    coarse_mm = min(first.input.spacing_mm)
    specimens: Sequence[Specimen] = [
        load_specimen(pair, names, recipe.spacing_mm, first.input.intensity, coarse_mm)
        for pair in trained
    ]
    if options.mirror:
        specimens = with_mirror_images(specimens, mean)
    torch.manual_seed(recipe.seed)
    network = build_network(recipe, len(names))
    if options.start is not None:
        load_model(network, options.start / "weights.safetensors")
    posed = tuple(pose_specimen(specimen, mean) for specimen in specimens)
    data = Data(tuple(names), mean, posed, tuple(held))
    where = (choose_device(options.device), console)
    train(network, recipe, data, options.model / FOLDER, where)


def make_parser() -> argparse.ArgumentParser:
    """Describe the options."""
    parser = argparse.ArgumentParser(prog="python -m models.train_refine", description=__doc__)
    add = parser.add_argument
    add("scans", type=Path, help="folder of .nii and .nii.gz files")
    add("landmarks", type=Path, help="folder of .mrk.json, .fcsv or .csv files of the same names")
    add("--model", type=Path, required=True, help="folder of the first model")
    add("--validate", nargs="*", default=[], metavar="NAME", help="scans to hold out")
    add("--spacing", type=float, required=True, help="grid spacing in mm")
    add("--radius", type=float, help="voting radius in mm; default: 5 voxels")
    add("--filters", type=int, nargs="+", default=[24, 48, 96, 128], help="channels per level")
    add("--stride", type=int, choices=(1, 2), default=2, help="grid voxels per output voxel")
    add("--steps", type=int, default=5000)
    add("--batch", type=int, default=1, help="images per step")
    add("--rate", type=float, default=1.5e-3, help="peak learning rate")
    add("--seed", type=int, default=1)
    add("--mirror", action="store_true", help="learn from mirror images, too")
    add("--start", type=Path, metavar="MODEL", help="model folder whose weights to start from")
    add("--device", default="auto", help="auto, cpu or cuda:N")
    return parser


def make_recipe(options: argparse.Namespace, mean: Points) -> Recipe:
    """Fill in what the options leave open from the mean shape."""
    filters = options.filters
    if len(filters) < LEAST_LEVELS or any(width % NORM_GROUPS for width in filters):
        raise SystemExit(
            f"--filters: expected at least {LEAST_LEVELS} multiples of {NORM_GROUPS}, got {filters}"
        )
    recipe = Recipe(
        spacing_mm=options.spacing,
        radius_mm=options.radius or RADIUS_VOXELS * options.spacing,
        sees="posed",
        stride=options.stride,
        filters=tuple(filters),
        steps=options.steps,
        batch=options.batch,
        rate=options.rate,
        seed=options.seed,
        augmentation=POSE_ERRORS,
    )
    margin = MARGIN * float(np.linalg.norm(np.nanmax(mean, axis=0) - np.nanmin(mean, axis=0)))
    half = np.nanmax(np.abs(mean), axis=0) + margin
    edges = -(-2 * half / options.spacing // recipe.divisor).astype(int) * recipe.divisor
    i, j, k = edges.tolist()
    return replace(recipe, tile_shape=(i, j, k))


def upright(mean: Points) -> Points:
    """Turn a mean shape so that the box around it is small: its principal axes become i, j, k."""
    known = mean[np.isfinite(mean).all(axis=1)]
    _, _, axes = np.linalg.svd(known - known.mean(axis=0), full_matrices=False)
    return np.asarray(mean @ (axes * np.sign(np.linalg.det(axes))).T)


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


if __name__ == "__main__":
    main()
