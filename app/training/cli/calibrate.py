"""``landmarkd calibrate``: 95 % regions and presence thresholds from held-out scans."""

from typing import Annotated

import typer

from app.settings import read_settings
from app.training.cli.arguments import (
    Device,
    Landmarks,
    MissingIs,
    ModelFolder,
    Scans,
    load_model,
    make_console,
    pair_scans,
    prepare,
)

Only = Annotated[
    list[str] | None,
    typer.Option(help="Name of a scan that the model was not trained on; may be repeated."),
]
UseFolds = Annotated[
    bool, typer.Option("--folds", help="Use all scans, each with the model of its fold.")
]


def calibrate(
    model: ModelFolder,
    scans: Scans,
    landmarks: Landmarks,
    only: Only = None,
    folds: UseFolds = False,
    missing: MissingIs = "unknown",
    device: Device = "auto",
) -> None:
    """Write 95 % regions and presence thresholds from held-out scans into model.toml.

    region95_mm is the radius that 95 % of errors stay within, region_margin_mm how far from the
    border of a scan that is known, region_scale_mm and region_spread_mm from which distance to the
    mean shape, and scatter of votes, on regions are wider. presence_threshold is the mass of
    votes that separates landmarks that are present from those that are cut away: each scan is
    answered whole, in halves, and as blank scans of its shape. With --folds, for a model that was
    trained with folds, each scan is answered by the model that was trained without it, so that all
    of them count.
    """
    prepare()
    from app.compute import choose_device
    from app.training.calibrate.calibration import (
        calibrate_model,
        finished_folds,
        load_fold_models,
    )
    from app.training.calibrate.calibration_runs import run_all
    from app.training.data.issues import print_warning
    from app.training.evaluate.leakage import describe_unrecorded, refuse_leaked

    if folds == bool(only):
        raise typer.BadParameter("expected either --only NAME, for each scan held out, or --folds")
    console = make_console(stderr=True)
    held_out = pair_scans(scans, landmarks, only or ())
    if only:
        refuse_leaked(model, held_out)
        print_warning(describe_unrecorded(model), console)
    loaded = load_model(model, device)
    made, models = None, dict.fromkeys(only or (), loaded)
    if folds:
        made = finished_folds(model, scans, landmarks)
        given = (choose_device(device), read_settings().precision)
        models = load_fold_models(model, made, *given)
    runs = run_all(models, held_out, console, missing, made)
    calibrate_model(model, loaded, runs, make_console(), made)
    load_model(model, device)
