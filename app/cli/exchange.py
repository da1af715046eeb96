"""Commands for model folders from elsewhere: ``landmarkd import``."""

from pathlib import Path
from typing import Annotated

import typer

from app.errors import StartupError

importing = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Make a model folder of another training."
)

NewFolder = Annotated[
    Path, typer.Option("-o", "--output", help="Model folder to write, such as models/NAME.")
]


@importing.callback()
def import_() -> None:
    """Make a model folder of another training."""


@importing.command()
def nnunet(
    results: Annotated[Path, typer.Argument(help="Folder with plans.json and fold_0, fold_1, ...")],
    output: NewFolder,
    orientation: Annotated[
        str | None,
        typer.Option(
            help="Where the axes i, j, k of the training scans' files point to, such as RAS or LPS."
        ),
    ] = None,
    fold: Annotated[
        list[str] | None, typer.Option(help="Fold to take; may be repeated (default: all).")
    ] = None,
    radius: Annotated[
        float | None,
        typer.Option(
            min=0.5,
            max=100.0,
            help="Radius in voxels of what marks a landmark in the training (nnLandmark: 15).",
        ),
    ] = None,
    model_version: Annotated[str, typer.Option(help="Version of the model.")] = "1.0.0",
) -> None:
    """Import a training of nnU-Net or nnLandmark; its folds become members of one model."""
    try:
        from app.exchange import import_nnunet
    except ModuleNotFoundError as error:
        raise StartupError(
            f"expected the package {error.name}; pip install 'landmarkd[nnunet]'"
        ) from error
    folder = import_nnunet(
        results,
        output,
        orientation=orientation,
        folds=fold or (),
        radius=radius,
        version=model_version,
    )
    typer.echo(f"{folder} is written; landmarkd check {folder} checks it")
