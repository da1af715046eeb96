"""Outcomes -> one self-contained HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from app.durable import write_file
from app.errors import LandmarkdError
from app.io import read_file, read_volume
from app.model import LoadedModel
from app.report import make_page, make_picture, make_table
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.digits import format_number
from app.training.evaluate.leakage import describe_leaked
from app.training.evaluate.metrics import measure_coverage, measure_presence
from app.training.evaluate.outcomes import Outcome
from app.training.evaluate.plots import plot_confidence, plot_errors, plot_in_scan, plot_success
from app.training.evaluate.tables import HEADINGS, MEANINGS, UNKNOWN, list_warnings, sections

SHOWN_ERRORS: Final = 6
"""How many of the largest errors are shown in their scans."""


@dataclass(frozen=True, slots=True)
class ReportHeader:
    """What a report is about.

    Attributes:
        title: Name and version of the model.
        text: Description of the model and the metrics, in plain text.
        folds: The fold of each scan, if there are folds.
        leaked: Scans that the model was trained on; they are marked.
    """

    title: str
    text: str
    folds: Mapping[str, str] = field(default_factory=dict)
    leaked: Sequence[str] = ()


def model_header(model: LoadedModel, leaked: Sequence[str] = ()) -> ReportHeader:
    """Return the header of a report about one model."""
    manifest = model.manifest
    text = (
        f"Digest {model.digest[:12]}, measured in {model.network.precision} on "
        f"{model.network.device}."
    )
    if manifest.description:  # Of a model that was just trained: none.
        text = f"{manifest.description}. {text}"
    return ReportHeader(f"{manifest.name} {manifest.version}", text, leaked=leaked)


def write_report(
    outcomes: Sequence[Outcome],
    header: ReportHeader,
    specimens: Sequence[SpecimenFiles],
    path: Path,
) -> None:
    """Write the report of a model, of one outcome at least, as an HTML page."""
    warning = describe_leaked(header.leaked)
    parts = [
        f"<h1>{escape(header.title)}</h1>",
        f"<p>{escape(header.text)} {len({outcome.scan for outcome in outcomes})} scans.</p>",
        *([f"<p><strong>{escape(warning)}</strong></p>"] if warning else []),
        _tables(outcomes, header),
        "<h2>Errors</h2>",
        make_picture(plot_errors(outcomes), "Error of each landmark"),
        '<div class="row">',
        make_picture(plot_success(outcomes), "Share placed within a distance"),
        make_picture(plot_confidence(outcomes), "Confidence against error"),
        "</div>",
        *_largest_errors(outcomes, specimens),
    ]
    write_file(path, make_page(f"{header.title}: evaluation", parts).encode())


def _tables(outcomes: Sequence[Outcome], header: ReportHeader) -> str:
    """Write the metrics of all and of each fold, and the others' folded away."""
    labels = {("scan", name): f"{name} (trained on)" for name in header.leaked}
    tables = {
        title: make_table(
            (title, *(heading.replace("_", " ") for heading in HEADINGS)),
            [(labels.get((title, name), name), *cells.values()) for name, cells in rows.items()],
        )
        for title, rows in sections(outcomes, header.folds)
    }
    counts = measure_presence(outcomes)
    unknown = f"<p>{UNKNOWN.format(counts.unknown)}.</p>" if counts.unknown else ""
    presence = make_table(
        ("status", "of present", "of absent"),
        [(name, str(present), str(absent)) for name, (present, absent) in counts.statuses.items()],
    )
    within, regions = measure_coverage(outcomes)
    share = f"{100 * within / regions:.1f} %" if regions else "none"
    region = f"<p>{share} of {regions} errors lie within their 95 % region.</p>"
    warnings = "".join(f"<p>{escape(warning)}</p>" for warning in list_warnings(outcomes))
    return (
        f"{tables['all']}{tables.get('fold', '')}<p>{MEANINGS}.</p>{presence}{unknown}{region}"
        f"{warnings}"
        f"<details><summary>By scan</summary>{tables['scan']}</details>"
        f"<details><summary>By landmark</summary>{tables['landmark']}</details>"
    )


def _largest_errors(outcomes: Sequence[Outcome], specimens: Sequence[SpecimenFiles]) -> list[str]:
    """Show the largest errors, each in its scan."""
    placed = [outcome for outcome in outcomes if np.isfinite(outcome.error_mm)]
    worst = sorted(placed, key=lambda outcome: -outcome.error_mm)[:SHOWN_ERRORS]
    scans = {files.name: files.scan for files in specimens}
    parts = ["<h2>The largest errors</h2>", '<div class="row">']
    for outcome in worst:
        caption = (
            f"{outcome.landmark} of {outcome.scan}: {format_number(outcome.error_mm)} mm, "
            f"{outcome.status}"
        )
        try:
            volume = read_volume(read_file(scans[outcome.scan]))
        except (LandmarkdError, OSError):  # It has been removed since it was measured.
            continue
        parts.append(make_picture(plot_in_scan(outcome, volume), caption))
    return [*parts, "</div>"]
