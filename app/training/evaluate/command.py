"""Model folder + scans with known landmarks -> how good the model is: ``landmarkd evaluate``."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from app.errors import LandmarkdError
from app.training.options import Missing

if TYPE_CHECKING:
    from app.inference import Detector
    from app.training.evaluate.outcomes import Outcome, Pair

ModelFolder = Annotated[Path, typer.Argument(help="A model folder.")]
Scans = Annotated[Path, typer.Option(help="Folder of .nii and .nii.gz files.")]
Landmarks = Annotated[Path, typer.Option(help="Folder of landmark files of the same names.")]
Only = Annotated[list[str] | None, typer.Option(help="Name of a scan to use; may be repeated.")]
MissingIs = Annotated[
    Missing,
    typer.Option(
        "--missing", help="What a landmark without a position is; unknown: no matter of presence."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda:N.")]


def evaluate(
    model: ModelFolder,
    scans: Scans,
    landmarks: Landmarks,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for tables and a report.")
    ] = None,
    only: Only = None,
    missing: MissingIs = "unknown",
    device: Device = "auto",
) -> None:
    """Measure a model on scans with known landmarks that it was not trained on.

    A landmark that lies outside the scan counts as absent. One that a file does not have may be
    there or not, and says nothing of presence, unless --missing absent says that it is not.
    """
    # Only here, because they pull in torch, and the help must not wait for it.
    from app.compute import choose_device
    from app.inference import Detector, load_checked
    from app.training.evaluate.leakage import learned_from, warning_of
    from app.training.evaluate.outcomes import choose_pairs
    from app.training.evaluate.tables import print_tables, write_tables

    if output is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("-o draws with matplotlib: pip install 'landmarkd[train]'")
    try:
        pairs = choose_pairs(scans, landmarks, only or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    detector = Detector(load_checked(model, choose_device(device)))
    console = Console(stderr=True)
    seen = learned_from(model, pairs)
    outcomes, failures = measure(detector, pairs, console, missing)
    print_tables(outcomes, Console())
    if output is not None and outcomes:
        from app.training.evaluate.report import about, write_report

        output.mkdir(parents=True, exist_ok=True)
        write_tables(outcomes, output)
        write_report(outcomes, about(detector.model, seen), pairs, output / "report.html")
        console.print(f"wrote {output / 'report.html'}, errors.csv and summary.csv")
    if seen:
        # Last, so that it is seen with the figures.
        told = warning_of(seen)
        console.print(told, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for failure in failures:
        console.print(f"[red]{failure}[/red]", highlight=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def measure(
    detector: "Detector",
    pairs: Sequence["Pair"],
    console: Console,
    missing: Missing = "unknown",
) -> tuple[tuple["Outcome", ...], list[str]]:
    """Run a model over scans; those that cannot be read are told of, and do not stop the others.

    Args:
        detector: The model.
        pairs: Name, scan and landmark file of each specimen.
        console: Shows the progress, and a warning of landmarks that the model does not know.
        missing: What a landmark is that a file does not have.

    Returns:
        The outcomes, and a line for each scan that failed.
    """
    from app.training.evaluate.outcomes import strange_names, validate_scan

    names = [landmark.name for landmark in detector.model.manifest.landmarks]
    outcomes: list[Outcome] = []
    failures: list[str] = []
    strange: dict[str, None] = {}
    for pair in track(pairs, "Detecting", console=console):
        try:
            strange.update(dict.fromkeys(strange_names(pair, names)))
            outcomes.extend(validate_scan(detector, pair, missing))
        except (LandmarkdError, OSError, ValueError) as error:
            failures.append(f"{pair[0]}: {error}")
    if strange:
        told = f"the model does not know these landmarks of the files: {', '.join(strange)}"
        console.print(f"[yellow]{told}[/yellow]", highlight=False, soft_wrap=True)
    return tuple(outcomes), failures
