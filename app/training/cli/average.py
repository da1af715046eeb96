"""``landmarkd average``: a model folder with the mean of two models' weights."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from app.training.cli.arguments import FOLDER, require_extra

Folder = Annotated[Path, typer.Argument(help="A model folder.", **FOLDER)]


def average(
    model: Folder,
    other: Folder,
    output: Annotated[Path, typer.Option("-o", "--output", help="Model folder to write.")],
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Weight of the first model; the other has the rest.")
    ] = 0.5,
    networks: Annotated[
        Literal["all", "first", "second"],
        typer.Option(help="Which networks to average; any other is copied from the first model."),
    ] = "all",
) -> None:
    """Average the weights of two models of one architecture, such as two runs of one training.

    Everything else is copied from the first model, except its 95 % regions, which hold for its own
    weights only. Presence thresholds are copied, but should be calibrated again.
    """
    require_extra()
    # Pulls in torch, which the help must not wait for.
    from app.training.average import average_models

    average_models(model, other, output, share, networks)
    Console().print(f"wrote {output}; measure it with landmarkd evaluate", highlight=False)
