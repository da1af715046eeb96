"""``landmarkd calibrate``: 95 % regions and presence thresholds from held-out scans."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from app.settings import Settings
from app.training.cli.arguments import (
    Device,
    Landmarks,
    MissingIs,
    ModelFolder,
    Scans,
    require_extra,
)

if TYPE_CHECKING:
    from app.training.calibrate.calibration_runs import Trial


def calibrate(
    model: ModelFolder,
    scans: Scans,
    landmarks: Landmarks,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Name of a scan that the model was not trained on; may be repeated."),
    ] = None,
    folds: Annotated[
        bool, typer.Option("--folds", help="Use all scans, each with the model of its fold.")
    ] = False,
    missing: MissingIs = "unknown",
    device: Device = "auto",
) -> None:
    """Write 95 % regions and presence thresholds from held-out scans into model.toml.

    region95_mm is the radius that 95 % of errors stay within. presence_threshold is the mass of
    votes that separates landmarks that are present from those that are cut away: each scan is
    answered whole, in halves, and as blank scans of its shape. With --folds, for a model that was
    trained with folds, each scan is answered by the model that was trained without it, so that all
    of them count.
    """
    require_extra()
    # Only here, because they pull in torch, and the help must not wait for it.
    from app.compute import choose_device
    from app.inference import load_checked
    from app.training.calibrate.calibration import choose_unseen, conclude
    from app.training.calibrate.calibration_runs import try_again, try_scan
    from app.training.calibrate.folds import describe, folds_of, models_of

    if folds == bool(only):
        raise typer.BadParameter("expected either --only NAME, for each scan held out, or --folds")
    pairs = choose_unseen(model, scans, landmarks, only or ())
    where = choose_device(device)
    load = partial(load_checked, model, where, allow_torchscript=Settings().allow_torchscript)
    loaded = load()
    crossed = folds_of(model, loaded, scans, landmarks) if folds else None
    tried = models_of(model, crossed, where) if crossed else dict.fromkeys(only or (), loaded)
    pairs = [pair for pair in pairs if pair[0] in tried]  # No fold is judged by all of them.
    bar, console = Console(stderr=True), Console()
    before: list[Trial] = []
    for pair in track(pairs, "As it is", console=bar):
        before += try_scan(tried[pair[0]], pair, missing)
    after: list[Trial] = []
    for pair in track(pairs, "Calibrated by the others", console=bar):
        after += try_again(tried[pair[0]], pair, before, missing)
    told = conclude(model, loaded, before, after, console, crossed)
    if crossed:
        describe(model, told)
    load()
