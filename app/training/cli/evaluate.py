"""``landmarkd evaluate``: the errors of a model on scans with known landmarks."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

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

Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder for tables and a report.")
]
Only = Annotated[list[str] | None, typer.Option(help="Name of a scan to use; may be repeated.")]


def evaluate(
    model: ModelFolder,
    scans: Scans,
    landmarks: Landmarks,
    output: Output = None,
    only: Only = None,
    missing: MissingIs = "unknown",
    device: Device = "auto",
) -> None:
    """Measure a model on scans with known landmarks that it was not trained on.

    A landmark outside the scan counts as absent. One that a file does not list counts neither as
    present nor as absent, unless --missing absent is given.
    """
    prepare()
    from app.inference import Detector
    from app.training.data.issues import print_warning
    from app.training.evaluate import measured as measurements
    from app.training.evaluate.leakage import describe_leaked, describe_unrecorded, find_leaked
    from app.training.evaluate.outcomes import measure
    from app.training.evaluate.report import model_header, write_report
    from app.training.evaluate.tables import print_tables, write_tables

    specimens = pair_scans(scans, landmarks, only or ())
    if output is not None:  # Before the scans are measured, which may take hours.
        output.mkdir(parents=True, exist_ok=True)
    detector = Detector(load_model(model, device))
    console = make_console(stderr=True)
    leaked = find_leaked(model, specimens)
    measured = measure(detector, track(specimens, "Detecting", console=console), console, missing)
    print_tables(measured.outcomes, make_console())
    deviations = measurements.compare_measurements(
        detector.model.manifest.measurements, measured.outcomes
    )
    measurements.print_measurements(deviations, make_console())
    if output is not None and measured.outcomes:
        write_tables(measured.outcomes, output)
        measurements.write_measurements(deviations, output)
        header = model_header(detector.model, leaked)
        write_report(measured.outcomes, header, specimens, output / "report.html")
        console.print(f"wrote {output / 'report.html'}, errors.csv and summary.csv")
    if measured.seconds is not None:
        console.print(f"{measured.seconds:.2f} s per scan (median), its file read", highlight=False)
    # Last, so that it stands next to the errors in the terminal.
    print_warning(describe_leaked(leaked) or describe_unrecorded(model), console)
    print_warning("\n".join(measured.failures), console, "red")
    if measured.failures:
        raise typer.Exit(1)
