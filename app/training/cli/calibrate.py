"""``landmarkd calibrate``: 95 % regions and presence thresholds from held-out scans."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.training.cli.arguments import (
    Device,
    Landmarks,
    MissingIs,
    ModelFolder,
    Scans,
    load_model,
    pair_scans,
    require_extra,
)


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
    regions_from: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="With --only: a model that was trained with folds, whose errors on all other "
            "scans give the regions.",
        ),
    ] = None,
    missing: MissingIs = "unknown",
    device: Device = "auto",
) -> None:
    """Write 95 % regions and presence thresholds from held-out scans into model.toml.

    region95_mm is the radius that 95 % of errors stay within. presence_threshold is the mass of
    votes that separates landmarks that are present from those that are cut away: each scan is
    answered whole, in halves, and as blank scans of its shape. With --folds, for a model that was
    trained with folds, each scan is answered by the model that was trained without it, so that all
    of them count. A few held-out scans have few errors: --regions-from takes the errors of the same
    recipe's folds instead, and shows how well they hold on the held-out scans.
    """
    require_extra()
    from app.compute import choose_device
    from app.training.calibrate.calibration import (
        calibrate_model,
        check_same_landmarks,
        finished_folds,
        load_fold_models,
    )
    from app.training.calibrate.calibration_runs import run_all
    from app.training.evaluate.leakage import refuse_leaked

    if folds == bool(only):
        raise typer.BadParameter("expected either --only NAME, for each scan held out, or --folds")
    if folds and regions_from:
        raise typer.BadParameter("expected --regions-from with --only NAME, got it with --folds")
    console, specimens = Console(stderr=True), pair_scans(scans, landmarks, ())
    held_out = pair_scans(scans, landmarks, only or ())
    if only:
        refuse_leaked(model, held_out)
    loaded = load_model(model, device)
    source = regions_from or (model if folds else None)
    made, of_folds = None, {}
    if source is not None:
        made = finished_folds(source, scans, landmarks)
        of_folds = load_fold_models(source, made, choose_device(device))
        check_same_landmarks(loaded, source)
    if folds:
        runs, elsewhere = run_all(of_folds, specimens, console, missing), None
    else:
        runs = run_all(dict.fromkeys(only or (), loaded), held_out, console, missing)
        others = [files for files in specimens if files not in held_out]
        elsewhere = run_all(of_folds, others, console, missing) if regions_from else None
    calibrate_model(model, loaded, runs, Console(), made, elsewhere)
    load_model(model, device)
