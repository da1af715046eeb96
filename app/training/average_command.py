"""``landmarkd average``: two models in, one with the average of their weights out."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

Folder = Annotated[Path, typer.Argument(help="A model folder.", exists=True, file_okay=False)]


def average(
    model: Folder,
    other: Folder,
    output: Annotated[Path, typer.Option("-o", "--output", help="Model folder to write.")],
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the first model; the rest is of the other.")
    ] = 0.5,
    networks: Annotated[
        Literal["all", "first", "second"],
        typer.Option(help="Which networks to average; one that is not is the first model's."),
    ] = "all",
) -> None:
    """Average the weights of two models of one architecture, such as two goes of one training.

    All but the weights is the first model's. Its 95 % regions are not taken over, as they were
    measured with its own weights; its presence thresholds are, but should be calibrated anew.
    """
    # Here, because it pulls in torch, which nobody wants to wait for who asks for help.
    from app.training.average import average_models

    average_models(model, other, output, share, networks)
    Console().print(
        f"wrote {output}; what it is worth tell landmarkd evaluate and calibrate", highlight=False
    )
