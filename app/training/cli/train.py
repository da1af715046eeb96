"""``landmarkd train`` and ``landmarkd refine``: a model folder from scans and landmark files."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from app.errors import BadParameter
from app.settings import spell_out
from app.training.cli.arguments import (
    FOLDER,
    Device,
    MissingIs,
    finite,
    make_console,
    prepare,
)
from app.training.files import REFINE

if TYPE_CHECKING:
    from app.training.options import Options

INTERRUPTED: Final = 130
"""Exit status of a command that was ended by Ctrl-C, as shells report it."""

SAVED: Final = "all is saved: the same command resumes from here"

FILTERS: Final = "24,48,96,128"

SHORTEST_MM: Final = 1e-5
"""Of a grid's spacing and a voting radius, so that neither is 0."""

NOWHERE: Final = Path(os.devnull, "model")
"""A model folder of which there is nothing, wherever the command is run."""


def _number(text: str, least: float, most: float | None = None, **named: Any) -> Any:  # noqa: ANN401 - as typer's own
    """Make an option of a finite number within bounds."""
    return typer.Option(callback=finite, min=least, max=most, help=text, **named)


def _share(text: str) -> Any:  # noqa: ANN401 - as typer's own
    """Make an option of a share of the images, say: from 0 to 1."""
    return _number(text, 0, 1)


def _held_out(default: str) -> Any:  # noqa: ANN401 - as typer's own
    text = f"Scans to hold out for validation. Default: {default}."
    return typer.Option(metavar="NAME,NAME|none", help=text)


Scans = Annotated[
    Path,
    typer.Argument(help="Folder of scans: .nii, .nii.gz, .nrrd, .mha, .mhd, .mgz, .zip.", **FOLDER),
]
Landmarks = Annotated[
    Path,
    typer.Argument(
        help="Folder of .mrk.json, .fcsv, .csv or .tsv files of the same names.", **FOLDER
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Check the data, print what would be trained, and stop.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Treat warnings about the data as errors.")]
Validate = Annotated[str | None, _held_out("about a fifth")]
ValidateSame = Annotated[str | None, _held_out("those of the first network")]
Model = Annotated[
    Path,
    typer.Argument(help="Folder of the model to refine.", callback=spell_out, **FOLDER),
]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Model folder to write.")]
Spacing = Annotated[
    float | None, _number("Grid spacing in mm. Default: from the landmarks.", SHORTEST_MM)
]
FinerSpacing = Annotated[
    float | None,
    _number("Grid spacing in mm. Default: 0.6 times the first network's.", SHORTEST_MM),
]
Tile = Annotated[
    str | None,
    typer.Option(
        metavar="N|whole",
        help="Slide over scans in tiles of N³ voxels, or see scans whole. Default: from the data.",
    ),
]
Rotation = Annotated[float, _number("Largest random rotation, degrees.", 0, 180)]
Intensity = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="How voxel values are scaled: percentile:LOWER,UPPER or window:LOWER,UPPER. "
        "Default: percentile:1,99.5.",
    ),
]
Radius = Annotated[float | None, _number("Voting radius in mm. Default: 5 voxels.", SHORTEST_MM)]
Filters = Annotated[str, typer.Option(metavar="N,N,N", help="Channels per level.")]
Steps = Annotated[int, typer.Option(min=1, help="Total number of optimiser steps.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Images per step.")]
Rate = Annotated[float, _number("Peak learning rate.", 0)]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
PassPrecision = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(
        "--precision",
        help="Of the network's passes. bfloat16 takes a third less time where the device computes "
        "it; on a CPU, a training that was interrupted then ends with other last bits. Default: "
        "bfloat16 on CUDA, else float32.",
    ),
]
Mirror = Annotated[bool, typer.Option("--mirror", help="Train on mirror images as well.")]
Cuts = Annotated[
    float,
    _share("Share of the steps whose scans are truncated among the landmarks, like half scans."),
]
Scale = Annotated[
    float | None,
    _number("Largest random change of size. Default: 0.1; 0.04 for a second network.", 0, 0.5),
]
Elastic = Annotated[
    float | None,
    _number(
        "Standard deviation of random elastic deformations, for subjects that bend. Default: "
        "a fraction of a voxel.",
        0,
        metavar="MM",
    ),
]
Contrast = Annotated[
    float,
    _share(
        "Share of the images whose contrast is changed at random, inverted even, so that the "
        "model works on other scanners and sequences."
    ),
]
Degrade = Annotated[
    float,
    _share(
        "Share of the images that are blurred and get noise at random, so that the model "
        "works on scans that are worse."
    ),
]
Reflect = Annotated[
    float,
    _share(
        "Share of the images that go on beyond the scan's border as its reflection, so that "
        "the model works on scans that show more."
    ),
]
Field = Annotated[
    float,
    _number(
        "Let some images be up to this many times as long along each axis, for a model that "
        "sees scans whole and shall work on those that show more around the subject.",
        1,
        3,
    ),
]
Start = Annotated[
    Path | None,
    typer.Option(metavar="MODEL", help="Model folder whose weights to start from.", **FOLDER),
]
FoldCount = Annotated[
    int | None,
    typer.Option(
        "--folds",
        metavar="K",
        help="Cross-validate: train K more models, each without one fold of the scans, and "
        "measure each on its fold.",
    ),
]
SameFolds = Annotated[
    int | None,
    typer.Option(
        "--folds", metavar="K", help="Cross-validate both networks with the first one's K folds."
    ),
]
Fold = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Train only this fold, so that several can run at once; then repeat without --fold.",
    ),
]
Subject = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="The part of a scan's name that identifies its subject; scans of one subject are "
        "held out together. Default: the name without a side or a frame at its end, such as _left.",
    ),
]
TrainOnly = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Scans that are always trained on and never held out, such as those whose landmarks "
        "a model has placed.",
    ),
]


def train(
    scans: Scans,
    landmarks: Landmarks,
    output: Output = None,
    check: Check = False,
    strict: Strict = False,
    validate: Validate = None,
    spacing: Spacing = None,
    radius: Radius = None,
    tile: Tile = None,
    filters: Filters = FILTERS,
    steps: Steps = 4500,
    batch: Batch = None,
    rate: Rate = 2e-3,
    seed: Seed = 1,
    rotation: Rotation = 180.0,
    scale: Scale = None,
    elastic: Elastic = None,
    contrast: Contrast = 0.0,
    degrade: Degrade = 0.0,
    reflect: Reflect = 0.0,
    field: Field = 1.0,
    missing: MissingIs = "unknown",
    intensity: Intensity = None,
    mirror: Mirror = False,
    cuts: Cuts = 0.0,
    start: Start = None,
    folds: FoldCount = None,
    fold: Fold = None,
    subject: Subject = None,
    train_only: TrainOnly = None,
    precision: PassPrecision = None,
    device: Device = "auto",
) -> None:
    """Train a model: scans and landmark files in, a model folder out. Repeat it to resume."""
    prepare()
    from app.training import options

    _train(options.Options(
        scans, landmarks, _folder(output, check), device=device, strict=strict, missing=missing,
        hold_out=options.read_names(validate), train_only=options.read_names(train_only) or (),
        folds=folds, fold=fold, subject=subject, spacing_mm=spacing, radius_mm=radius, cuts=cuts,
        tile=options.read_tile(tile), filters=options.read_filters(filters), start=start,
        intensity=options.read_intensity(intensity), steps=steps, batch=batch, rate=rate, seed=seed,
        precision=precision, mirror=mirror, augmentation=_given(
            rotation_deg=rotation, scale=scale, elastic_mm=elastic, contrast=contrast,
            degrade=degrade, reflect=reflect, field=field,
        ),
    ), check)  # fmt: skip


def refine(
    model: Model,
    scans: Scans,
    landmarks: Landmarks,
    check: Check = False,
    strict: Strict = False,
    validate: ValidateSame = None,
    spacing: FinerSpacing = None,
    radius: Radius = None,
    filters: Filters = FILTERS,
    steps: Steps = 5000,
    batch: Batch = 1,
    rate: Rate = 1.5e-3,
    seed: Seed = 1,
    scale: Scale = None,
    elastic: Elastic = None,
    contrast: Contrast = 0.0,
    degrade: Degrade = 0.0,
    mirror: Mirror = False,
    cuts: Cuts = 0.0,
    start: Start = None,
    folds: SameFolds = None,
    fold: Fold = None,
    precision: PassPrecision = None,
    device: Device = "auto",
) -> None:
    """Train a model's second network, which sees the subject closer, in the pose that was found.

    Errors become several times smaller. An interrupted training resumes when the command is
    repeated.
    """
    prepare()
    from app.training import options

    _train(options.Options(
        scans, landmarks, model, device=device, strict=strict,
        hold_out=options.read_names(validate), folds=folds, fold=fold,
        spacing_mm=spacing, radius_mm=radius, tile=None,
        filters=options.read_filters(filters),
        steps=steps, batch=batch, rate=rate, seed=seed, precision=precision,
        mirror=mirror, cuts=cuts, start=start, inner=REFINE,
        augmentation=_given(
            scale=scale, elastic_mm=elastic, contrast=contrast, degrade=degrade
        ),
    ), check)  # fmt: skip


def _given(**values: float | None) -> dict[str, float]:
    """Leave out what is left to the network's own default."""
    return {name: value for name, value in values.items() if value is not None}


def _folder(output: Path | None, check: bool) -> Path:
    """Return the model folder to write; ``--check`` writes none."""
    if output is None and not check:
        raise BadParameter("expected -o FOLDER, the model folder to write, or --check")
    if output is None:
        return NOWHERE
    from app.model import is_model_name

    folder = spell_out(output)
    if not is_model_name(folder.name):
        raise BadParameter(
            "-o: expected a folder whose name is that of a model, of small letters, digits and "
            f"hyphens, got {folder.name}"
        )
    return folder


def _train(options: "Options", check: bool) -> None:
    """Train the first or second network of a model; exit with 130 if interrupted."""
    from app.training.crossvalidate import crossvalidate
    from app.training.pipeline import train_network

    crossed = options.folds is not None or options.fold is not None
    run, console = crossvalidate if crossed else train_network, make_console()
    if not run(options, console, only_check=check):
        console.print(SAVED)
        raise typer.Exit(INTERRUPTED)
