"""Outcomes -> one self-contained HTML page."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from app.errors import LandmarkdError
from app.io import read_volume
from app.model import LoadedModel
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.leakage import describe_leaked
from app.training.evaluate.metrics import measure_coverage, measure_presence
from app.training.evaluate.outcomes import Outcome
from app.training.evaluate.plots import plot_confidence, plot_errors, plot_in_scan, plot_success
from app.training.evaluate.tables import HEADINGS, MEANINGS, UNKNOWN, sections

SHOWN_ERRORS: Final = 6
"""How many of the largest errors are shown in their scans."""

STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { padding: 0.15rem 0.6rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
.row { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0 0 1rem; }
figcaption { font-size: 0.85rem; }
"""


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
    text = f"{manifest.description}. Digest {model.digest[:12]}."
    return ReportHeader(f"{manifest.name} {manifest.version}", text, leaked=leaked)


def write_report(
    outcomes: Sequence[Outcome],
    header: ReportHeader,
    specimens: Sequence[SpecimenFiles],
    path: Path,
) -> None:
    """Write the report of a model.

    Args:
        outcomes: At least one.
        header: What they are of.
        specimens: The scans, for the plots of the largest errors.
        path: The HTML file.
    """
    warning = describe_leaked(header.leaked)
    parts = [
        f"<h1>{escape(header.title)}</h1>",
        f"<p>{escape(header.text)} {len({outcome.scan for outcome in outcomes})} scans.</p>",
        *([f"<p><strong>{escape(warning)}</strong></p>"] if warning else []),
        _tables(outcomes, header),
        "<h2>Errors</h2>",
        _picture(plot_errors(outcomes), "Error of each landmark"),
        '<div class="row">',
        _picture(plot_success(outcomes), "Share placed within a distance"),
        _picture(plot_confidence(outcomes), "Confidence against error"),
        "</div>",
        *_largest_errors(outcomes, specimens),
    ]
    title = f"{escape(header.title)}: evaluation"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'
    path.write_text(page, encoding="utf-8")


def _tables(outcomes: Sequence[Outcome], header: ReportHeader) -> str:
    """Write the metrics of all and of each fold, and the others' folded away."""
    labels = {("scan", name): f"{name} (trained on)" for name in header.leaked}
    tables = {
        title: _table(
            (title, *(heading.replace("_", " ") for heading in HEADINGS)),
            [(labels.get((title, name), name), *cells.values()) for name, cells in rows.items()],
        )
        for title, rows in sections(outcomes, header.folds)
    }
    counts = measure_presence(outcomes)
    unknown = f"<p>{UNKNOWN.format(counts.unknown)}.</p>" if counts.unknown else ""
    presence = _table(
        ("status", "of present", "of absent"),
        [(name, str(present), str(absent)) for name, (present, absent) in counts.statuses.items()],
    )
    within, regions = measure_coverage(outcomes)
    share = f"{100 * within / regions:.1f} %" if regions else "none"
    region = f"<p>{share} of {regions} errors lie within their 95 % region.</p>"
    return (
        f"{tables['all']}{tables.get('fold', '')}<p>{MEANINGS}.</p>{presence}{unknown}{region}"
        f"<details><summary>By scan</summary>{tables['scan']}</details>"
        f"<details><summary>By landmark</summary>{tables['landmark']}</details>"
    )


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _largest_errors(outcomes: Sequence[Outcome], specimens: Sequence[SpecimenFiles]) -> list[str]:
    """Show the largest errors, each in its scan."""
    placed = [outcome for outcome in outcomes if np.isfinite(outcome.error_mm)]
    worst = sorted(placed, key=lambda outcome: -outcome.error_mm)[:SHOWN_ERRORS]
    scans = {files.name: files.scan for files in specimens}
    parts = ["<h2>The largest errors</h2>", '<div class="row">']
    for outcome in worst:
        caption = (
            f"{outcome.landmark} of {outcome.scan}: {outcome.error_mm:.3f} mm, {outcome.status}"
        )
        try:
            volume = read_volume(scans[outcome.scan].read_bytes())
        except (LandmarkdError, OSError):  # It has been removed since it was measured.
            continue
        parts.append(_picture(plot_in_scan(outcome, volume), caption))
    return [*parts, "</div>"]


def _picture(svg: str, caption: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    words = escape(caption)
    return (
        f'<figure><img alt="{words}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure>"
    )
