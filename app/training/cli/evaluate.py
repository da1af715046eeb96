"""``landmarkd evaluate``: the errors of a model on scans with known landmarks."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.settings import Settings
from app.training.cli.arguments import (
    Device,
    Landmarks,
    MissingIs,
    ModelFolder,
    Scans,
    require_extra,
)


def evaluate(
    model: ModelFolder,
    scans: Scans,
    landmarks: Landmarks,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for tables and a report.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a scan to use; may be repeated.")
    ] = None,
    missing: MissingIs = "unknown",
    device: Device = "auto",
) -> None:
    """Measure a model on scans with known landmarks that it was not trained on.

    A landmark outside the scan counts as absent. One that a file does not list may be present or
    not, and does not count towards presence, unless --missing absent is given.
    """
    require_extra()
    # Only here, because they pull in torch and matplotlib, and the help must not wait for them.
    from app.compute import choose_device
    from app.inference import Detector, load_checked
    from app.training.evaluate.leakage import learned_from, warning_of
    from app.training.evaluate.outcomes import choose_pairs, measure
    from app.training.evaluate.report import about, write_report
    from app.training.evaluate.tables import print_tables, write_tables

    try:
        pairs = choose_pairs(scans, landmarks, only or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    allow = Settings().allow_torchscript
    detector = Detector(load_checked(model, choose_device(device), allow_torchscript=allow))
    console = Console(stderr=True)
    leaked = learned_from(model, pairs)
    outcomes, failures = measure(detector, pairs, console, missing)
    print_tables(outcomes, Console())
    if output is not None and outcomes:
        output.mkdir(parents=True, exist_ok=True)
        write_tables(outcomes, output)
        write_report(outcomes, about(detector.model, leaked), pairs, output / "report.html")
        console.print(f"wrote {output / 'report.html'}, errors.csv and summary.csv")
    if leaked:
        # Last, so that it stands next to the errors in the terminal.
        warning = warning_of(leaked)
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for failure in failures:
        console.print(f"[red]{failure}[/red]", highlight=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)
