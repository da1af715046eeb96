"""``landmarkd calibrate``: 95 % regions and presence thresholds from held-out scans."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from app.training.cli.arguments import (
    FOLDER,
    Device,
    Landmarks,
    MissingIs,
    ModelFolder,
    Scans,
    load_model,
    pair_scans,
    require_extra,
)

if TYPE_CHECKING:
    from app.model import LoadedModel
    from app.training.data.folds import Folds


Only = Annotated[
    list[str] | None,
    typer.Option(help="Name of a scan that the model was not trained on; may be repeated."),
]
UseFolds = Annotated[
    bool, typer.Option("--folds", help="Use all scans, each with the model of its fold.")
]
RegionsFrom = Annotated[
    Path | None,
    typer.Option(
        **FOLDER,
        help="With --only: a model that was trained with folds, whose errors on all other scans "
        "give the regions.",
    ),
]


def calibrate(
    model: ModelFolder,
    scans: Scans,
    landmarks: Landmarks,
    only: Only = None,
    folds: UseFolds = False,
    regions_from: RegionsFrom = None,
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
    from app.training.calibrate.calibration import calibrate_model
    from app.training.calibrate.calibration_runs import run_all
    from app.training.evaluate.leakage import refuse_leaked

    if folds == bool(only):
        raise typer.BadParameter("expected either --only NAME, for each scan held out, or --folds")
    if folds and regions_from:
        raise typer.BadParameter("expected --regions-from with --only NAME, got it with --folds")
    held_out = pair_scans(scans, landmarks, only or ())
    if only:
        refuse_leaked(model, held_out)
    loaded, console, elsewhere = load_model(model, device), Console(stderr=True), None
    made, models = None, dict.fromkeys(only or (), loaded)
    if source := model if folds else regions_from:
        made, of_folds = read_fold_models(source, loaded, scans, landmarks, device)
        if folds:
            models = of_folds
        else:
            others = [one for one in pair_scans(scans, landmarks, ()) if one.name not in models]
            elsewhere = run_all(of_folds, others, console, missing)
    runs = run_all(models, held_out, console, missing)
    calibrate_model(model, loaded, runs, Console(), made, elsewhere)
    load_model(model, device)


def read_fold_models(
    folder: Path, model: "LoadedModel", scans: Path, landmarks: Path, device: str
) -> "tuple[Folds, dict[str, LoadedModel]]":
    """Read the folds of a model of the same landmarks, and load the model of each scan.

    Raises:
        LandmarkdError: There are none, they are not finished, or they are of something else.
    """
    from app.compute import choose_device
    from app.training.calibrate.calibration import (
        check_same_landmarks,
        finished_folds,
        load_fold_models,
    )

    folds = finished_folds(folder, scans, landmarks)
    check_same_landmarks(model, folder)
    return folds, load_fold_models(folder, folds, choose_device(device))
