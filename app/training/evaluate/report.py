"""Outcomes -> one page, which needs no other file and nothing from the network."""

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
from app.training.evaluate.leakage import warning_of
from app.training.evaluate.metrics import measure_coverage, measure_presence
from app.training.evaluate.outcomes import Outcome, Pair
from app.training.evaluate.plots import Case, plot_case, plot_confidence, plot_errors, plot_success
from app.training.evaluate.tables import HEADINGS, MEANINGS, UNKNOWN, sections

WORST: Final = 6
"""How many of the largest errors are shown."""

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
class About:
    """What a report is of.

    Attributes:
        title: Name and version of the model.
        text: What it is, and what the figures are, in plain text.
        folds: The fold of each scan, if there are folds.
        seen: Scans that the model has learned from; they are marked.
    """

    title: str
    text: str
    folds: Mapping[str, str] = field(default_factory=dict)
    seen: Sequence[str] = ()


def about(model: LoadedModel, seen: Sequence[str] = ()) -> About:
    """Say what a report of one model is of, and which of the scans it has learned from."""
    manifest = model.manifest
    text = f"{manifest.description}. Digest {model.digest[:12]}."
    return About(f"{manifest.name} {manifest.version}", text, seen=seen)


def write_report(
    outcomes: Sequence[Outcome], what: About, pairs: Sequence[Pair], path: Path
) -> None:
    """Write the report of a model.

    Args:
        outcomes: At least one.
        what: Whose they are.
        pairs: Where the scans are, for the pictures of the worst cases.
        path: The HTML file.
    """
    parts = [
        f"<h1>{escape(what.title)}</h1>",
        f"<p>{escape(what.text)} {len({outcome.scan for outcome in outcomes})} scans.</p>",
        *([f"<p><strong>{escape(warning_of(what.seen))}</strong></p>"] if what.seen else []),
        _tables(outcomes, what),
        "<h2>Errors</h2>",
        _picture(plot_errors(outcomes), "Error of each landmark"),
        '<div class="row">',
        _picture(plot_success(outcomes), "Share placed within a distance"),
        _picture(plot_confidence(outcomes), "Confidence against error"),
        "</div>",
        *_worst(outcomes, pairs),
    ]
    title = f"{escape(what.title)}: how good is it?"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'
    path.write_text(page, encoding="utf-8")


def _tables(outcomes: Sequence[Outcome], what: About) -> str:
    """Write the figures of all and each fold, and the others' out of sight until asked for."""
    marks = {("scan", name): f"{name} (learned from)" for name in what.seen}
    tables = {
        title: _table(
            (title, *(heading.replace("_", " ") for heading in HEADINGS)),
            [(marks.get((title, name), name), *cells.values()) for name, cells in lines.items()],
        )
        for title, lines in sections(outcomes, what.folds)
    }
    counts = measure_presence(outcomes)
    unknown = f"<p>{UNKNOWN.format(counts.unknown)}.</p>" if counts.unknown else ""
    presence = _table(
        ("status", "of present", "of absent"),
        [(name, str(there), str(gone)) for name, (there, gone) in counts.statuses.items()],
    )
    inside, told = measure_coverage(outcomes)
    share = f"{100 * inside / told:.1f} %" if told else "none"
    region = f"<p>{share} of {told} errors lie within the 95 % region that they were told with.</p>"
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


def _worst(outcomes: Sequence[Outcome], pairs: Sequence[Pair]) -> list[str]:
    """Show the largest errors, each in its scan."""
    placed = [outcome for outcome in outcomes if np.isfinite(outcome.error_mm)]
    worst = sorted(placed, key=lambda outcome: -outcome.error_mm)[:WORST]
    scans = {name: scan for name, scan, _ in pairs}
    parts = ["<h2>The largest errors</h2>", '<div class="row">']
    for outcome in worst:
        told = f"{outcome.landmark} of {outcome.scan}: {outcome.error_mm:.3f} mm, {outcome.status}"
        try:
            volume = read_volume(scans[outcome.scan].read_bytes())
        except (LandmarkdError, OSError):  # It was there when it was measured.
            continue
        parts.append(_picture(plot_case(Case(outcome, volume)), told))
    return [*parts, "</div>"]


def _picture(svg: str, caption: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    words = escape(caption)
    return (
        f'<figure><img alt="{words}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure>"
    )
