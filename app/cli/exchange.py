"""Commands for model folders from elsewhere, and for elsewhere: import, pack and install."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from app.settings import read_settings, spell_out

importing = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Make a model folder of another training."
)

NewFolder = Annotated[
    Path, typer.Option("-o", "--output", help="Model folder to write, such as models/NAME.")
]


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
    from app.exchange import nnunet as training

    folder = training.import_nnunet(
        results,
        output,
        orientation=orientation,
        folds=fold or (),
        radius=radius,
        version=model_version,
    )
    typer.echo(f"{folder} is written; landmarkd check {folder} checks it")


@importing.command()
def monai(
    bundle: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of the bundle, unpacked.")
    ],
    output: NewFolder,
    landmark: Annotated[
        list[str] | None,
        typer.Option(help="Name of a channel's landmark; once for each (default: channel_def)."),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="KEY=VALUE of model.toml, such as voting.radius_mm=7.2; may be repeated."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Transform of the bundle to leave out.")
    ] = None,
) -> None:
    """Import a MONAI bundle with ONNX, weights of a network of MONAI, or TorchScript."""
    from app.exchange import monai as bundles

    folder = bundles.import_monai(
        bundle,
        output,
        landmarks=landmark or (),
        given=given or (),
        ignored=ignore or (),
        allow_torchscript=read_settings().allow_torchscript,
    )
    typer.echo(f"{folder} is written; landmarkd check {folder} checks it")


def pack(
    folder: Annotated[Path, typer.Argument(help="A model folder.", callback=spell_out)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write: NAME-VERSION.zip.")
    ] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Pack the tables that the card names: they name scans.")
    ] = False,
) -> None:
    """Pack a model folder, with its card, licence and hashes, into one file to share."""
    from app.cli.local import load_model
    from app.exchange import find_tables, pack_model
    from app.model import hash_file

    load_model(folder, read_settings())
    file = pack_model(folder, output, tables)
    typer.echo(f"{file} is written; its SHA-256 is {hash_file(file)}")
    if not tables and (left := find_tables(folder)):
        typer.echo(
            f"its card names {', '.join(left)}, left out as it may name scans of patients: "
            "--tables packs what the card names"
        )


def install(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A file that landmarkd pack wrote.")
    ],
    models_dir: Annotated[
        Path | None, typer.Option(help="Folder of model folders (default: LANDMARKD_MODELS_DIR).")
    ] = None,
) -> None:
    """Unpack a model beside the others, if its hashes and its self-check are right."""
    from app.cli.local import load_model
    from app.exchange import install_model

    settings = read_settings(models_dir=models_dir)
    check = partial(load_model, settings=settings)
    folder, new = install_model(file, settings.models_dir, check)
    if new:
        typer.echo(f"{folder} is installed; a running service serves it after its reload")
    else:
        typer.echo(f"{folder} is there already")
