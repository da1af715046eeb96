"""``landmarkd export``: the landmarks of many scans for programs of geometric morphometrics."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import typer
from rich.console import Console

from app.durable import write_file
from app.errors import BadParameter, StartupError
from app.io import is_landmark_file
from app.shapes import COHORT_FORMATS, Cohort, read_cohort, write_shape_report

FormatName = Literal["tps", "morphologika", "nts", "csv"]
FORMAT_NAMES: Final = ", ".join(get_args(FormatName))
SUFFIXES: Final[dict[str, FormatName]] = {".tps": "tps", ".nts": "nts", ".csv": "csv"}
REPORT_NEEDS: Final = ("matplotlib", "scipy")


def export(
    answers: Annotated[
        Path,
        typer.Argument(
            help="What landmarkd detect wrote of many scans: a folder of files, or one table."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File; default: standard output.")
    ] = None,
    format_: Annotated[
        FormatName | None, typer.Option("--format", help="Default: by the suffix of -o.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for a report on the shapes, their scores and their mean."),
    ] = None,
    detected_only: Annotated[
        bool,
        typer.Option("--detected-only", help="Count doubtful points (low_confidence) as missing."),
    ] = False,
) -> None:
    """Export the landmarks of many scans for geometric morphometrics, and report on their shapes.

    Missing points stay missing: NA, or in NTS the number that its first line names.
    """
    name = format_ or (SUFFIXES.get(output.suffix) if output else None)
    if name is None and (output is not None or report is None):
        raise BadParameter(f"--format: expected one of {FORMAT_NAMES}, got none")
    if output is not None:
        _spare_answers(answers, output, "-o")
    if report is not None:
        _spare_answers(answers, report / "mean_shape.mrk.json", "--report")
    cohort = read_cohort(answers, detected_only=detected_only)
    console = Console(stderr=True, highlight=False)
    if name is not None:
        text = COHORT_FORMATS[name](cohort)
        if output is None:
            typer.echo(text, nl=False)
        else:
            write_file(output, text.encode())
    if report is not None:
        _report(cohort, report)
        console.print(f"wrote {report / 'report.html'}", markup=False)
    counts = f"{len(cohort.specimens)} specimens, {len(cohort.landmarks)} landmarks"
    counts += f", {cohort.count_missing()} points missing"
    if doubtful := cohort.count_doubtful():
        left_in = f", {doubtful} doubtful (--detected-only leaves them out)"
        counts += f", {doubtful} of them doubtful" if detected_only else left_in
    console.print(counts, markup=False, soft_wrap=True)


def _spare_answers(answers: Path, output: Path, option: str) -> None:
    """Refuse to write what is read, or would be the next time, as an answer in the folder."""
    if output.exists() and answers.exists() and answers.samefile(output):
        raise BadParameter(
            f"{option}: expected another file than the one that is read, got {output}"
        )
    folder = output.parent
    is_within = answers.is_dir() and folder.exists() and answers.samefile(folder)
    if is_within and (is_landmark_file(output) or output.suffix == ".json"):
        raise BadParameter(
            f"{option}: expected another folder than the one that is read, as {output.name} would "
            f"count as an answer there, got {folder}"
        )


def _report(cohort: Cohort, folder: Path) -> None:
    missing = [name for name in REPORT_NEEDS if find_spec(name) is None]
    if missing:
        raise StartupError(f"--report needs {', '.join(missing)}: pip install 'landmarkd[train]'")
    write_shape_report(cohort, folder)
