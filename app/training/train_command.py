"""``landmarkd train`` and ``landmarkd refine``: scans and landmark files in, a served model out."""

from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.console import Console

from app.errors import BadParameter
from app.training.options import (
    Options,
    Schedule,
    read_filters,
    read_intensity,
    read_names,
    read_tile,
)

INTERRUPTED: Final = 130
"""What shells take for the end by Ctrl-C."""

FILTERS: Final = "24,48,96,128"

FOLDER: Final = {"exists": True, "file_okay": False}

Scans = Annotated[Path, typer.Argument(help="Folder of .nii and .nii.gz files.", **FOLDER)]
Landmarks = Annotated[
    Path,
    typer.Argument(
        help="Folder of .mrk.json, .fcsv, .csv or .tsv files of the same names.", **FOLDER
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Check the data, say what would be trained, and stop.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Let warnings about the data stop it, too.")]
Validate = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME|none", help="Scans to hold out and judge by. Default: about a fifth."
    ),
]
ValidateAgain = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME|none",
        help="Scans to hold out and judge by. Default: those of the first training.",
    ),
]
Model = Annotated[Path, typer.Argument(help="Folder of the first model.", **FOLDER)]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Model folder to write.")]
Spacing = Annotated[
    float | None, typer.Option(min=1e-5, help="Grid spacing in mm. Default: from the landmarks.")
]
Finer = Annotated[
    float | None,
    typer.Option(min=1e-5, help="Grid spacing in mm. Default: 0.6 of the first one's."),
]
Tile = Annotated[
    str | None,
    typer.Option(
        metavar="N|whole",
        help="Slide over scans in tiles of N³ voxels, or see them whole. Default: by the data.",
    ),
]
Rotation = Annotated[float, typer.Option(min=0, max=180, help="Largest random rotation, degrees.")]
Missing = Annotated[
    Literal["unknown", "absent"], typer.Option(help="What a landmark without a position is.")
]
Intensity = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="How voxel values are scaled: percentile:LOWER,UPPER, window:LOWER,UPPER, zscore or "
        "none. Default: percentile:1,99.5.",
    ),
]
Radius = Annotated[
    float | None, typer.Option(min=1e-5, help="Voting radius in mm. Default: 5 voxels.")
]
Filters = Annotated[str, typer.Option(metavar="N,N,N", help="Channels per level.")]
Stride = Annotated[int, typer.Option(min=1, max=2, help="Grid voxels per output voxel.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps in all.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Images per step.")]
Rate = Annotated[float, typer.Option(min=0, help="Peak learning rate.")]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Mirror = Annotated[bool, typer.Option("--mirror", help="Learn from mirror images, too.")]
Cuts = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Share of the steps whose scans are cut amid the landmarks, as halves are.",
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
        help="Cross-validate: train K models more, each without a K-th of the scans, and judge it "
        "by those.",
    ),
]
SameFolds = Annotated[
    int | None,
    typer.Option(
        "--folds", metavar="K", help="Cross-validate both networks by the first one's K folds."
    ),
]
Fold = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Do only this one of the --folds, so that several can run at once; then all without.",
    ),
]
Subject = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="Part of a scan's name that says whom it shows, as all scans of a subject are in one "
        "fold. Default: the name without a side at its end, such as _left.",
    ),
]
TrainOnly = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Scans to learn from and never to judge by, such as those posed by a model.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda:N.")]


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
    stride: Stride = 2,
    steps: Steps = 4500,
    batch: Batch = None,
    rate: Rate = 2e-3,
    seed: Seed = 1,
    rotation: Rotation = 180.0,
    missing: Missing = "unknown",
    intensity: Intensity = None,
    mirror: Mirror = False,
    cuts: Cuts = 0.0,
    start: Start = None,
    folds: FoldCount = None,
    fold: Fold = None,
    subject: Subject = None,
    train_only: TrainOnly = None,
    device: Device = "auto",
) -> None:
    """Train a model: scans and landmark files in, a model folder out.

    The data are checked first. Interrupted, it goes on where it was if the command is repeated.
    With --folds, the model learns from all scans, and models of its folds tell its error.
    """
    options = Options(
        scans=scans, landmarks=landmarks, folder=_folder(output, check), device=device,
        hold_out=read_names(validate), folds=folds, fold=fold, subject=subject,
        train_only=read_names(train_only) or (), strict=strict,
        spacing_mm=spacing, radius_mm=radius, tile=read_tile(tile),
        filters=read_filters(filters), stride=2 if stride == 2 else 1,
        schedule=Schedule(steps=steps, batch=batch, rate=rate, seed=seed),
        mirror=mirror, cuts=cuts, start=start, rotation_deg=rotation, missing=missing,
        intensity=read_intensity(intensity),
    )  # fmt: skip
    _train(options, check, second=False)


def refine(
    model: Model,
    scans: Scans,
    landmarks: Landmarks,
    check: Check = False,
    strict: Strict = False,
    validate: ValidateAgain = None,
    spacing: Finer = None,
    radius: Radius = None,
    filters: Filters = FILTERS,
    stride: Stride = 2,
    steps: Steps = 5000,
    batch: Batch = 1,
    rate: Rate = 1.5e-3,
    seed: Seed = 1,
    mirror: Mirror = False,
    cuts: Cuts = 0.0,
    start: Start = None,
    folds: SameFolds = None,
    fold: Fold = None,
    device: Device = "auto",
) -> None:
    """Train a model's second network, which looks again, closer, where the first one shows.

    Errors become several times smaller. Interrupted, it goes on if the command is repeated.
    """
    options = Options(
        scans=scans,
        landmarks=landmarks,
        folder=model,
        hold_out=read_names(validate),
        spacing_mm=spacing,
        radius_mm=radius,
        tile=None,
        filters=read_filters(filters),
        stride=2 if stride == 2 else 1,
        schedule=Schedule(steps=steps, batch=batch, rate=rate, seed=seed),
        mirror=mirror,
        start=start,
        device=device,
        strict=strict,
        cuts=cuts,
        folds=folds,
        fold=fold,
    )
    _train(options, check, second=True)


def _folder(output: Path | None, check: bool) -> Path:
    """Say which model folder to write; a check writes none."""
    if output is None and not check:
        raise BadParameter("expected -o FOLDER, the model folder to write, or --check")
    return output or Path()


def _train(options: Options, check: bool, *, second: bool) -> None:
    """Train a first or second network, and end the command, as an interrupted one if it was."""
    # Here, because these pull in torch, which nobody wants to wait for who asks for help.
    from app.training.crossvalidate import FIRST, SECOND, crossvalidate
    from app.training.train_first import train_first
    from app.training.train_refine import train_refine

    if options.folds is not None or options.fold is not None:
        done = crossvalidate(options, SECOND if second else FIRST, Console(), only_check=check)
    else:
        train = train_refine if second else train_first
        done = train(options, Console(), only_check=check)
    if not done:
        raise typer.Exit(INTERRUPTED)
