"""Pooled outcomes of all folds -> tables, a report, and a section of the model card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rich.console import Console

from app.training.data.folds import Folds
from app.training.data.issues import print_warning
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.metrics import WITHIN_MM, measure_presence
from app.training.evaluate.model_card import BOTH_NETWORKS, FIRST_ALONE, write_section
from app.training.evaluate.outcomes import Outcome
from app.training.evaluate.report import ReportHeader, write_report
from app.training.evaluate.spread import describe_spread
from app.training.evaluate.tables import (
    MEANINGS,
    UNKNOWN,
    WITHIN,
    Cells,
    print_tables,
    sections,
    write_tables,
)
from app.training.files import FOLDS, REFINE


@dataclass(frozen=True, slots=True)
class PooledOutcomes:
    """Outcomes of the models of all folds, each on scans that it was not trained on.

    Attributes:
        model: Folder of the model whose folds they are.
        folds: Which scans were held out together.
        outcomes: One for each scan and landmark.
        failures: A line for each scan that could not be answered.
        is_refine: Whether both networks answered, not the first one alone.
    """

    model: Path
    folds: Folds
    outcomes: tuple[Outcome, ...]
    failures: tuple[str, ...]
    is_refine: bool

    @property
    def folder(self) -> Path:
        """Folder of its tables."""
        return self.model / FOLDS / REFINE if self.is_refine else self.model / FOLDS

    def spread(self) -> str:
        """Say how much the mean error varies."""
        folds = self.folds
        return describe_spread(self.outcomes, folds.subjects, folds.by_scan())

    def explanation(self) -> str:
        """Explain what the metrics are of."""
        count, scans = len(self.folds.members), len(self.folds.by_scan())
        share, more = Fraction(count - 1, count), len(self.folds.digests) - scans
        models = "pairs of networks" if self.is_refine else "models of one network"
        rest = f" and on {more} more that are never held out" if more else ""
        return (
            "These are metrics of cross-validation: not of the model that is served but of "
            f"{count} {models} that were trained alike, each on about {share} of the {scans} scans"
            f"{rest}, and answered those that it was not trained on. The model that is served was "
            "trained alike on all of them."
        )


def report_pooled(
    pooled: PooledOutcomes, specimens: Sequence[SpecimenFiles], console: Console
) -> None:
    """Print and write the metrics of a cross-validation: tables, CSV files and a report."""
    folder, folds = pooled.folder, pooled.folds.by_scan()
    folder.mkdir(parents=True, exist_ok=True)
    print_tables(pooled.outcomes, console, folds)
    console.print(pooled.spread(), highlight=False)
    print_warning("\n".join(pooled.failures), console, "red")
    write_tables(pooled.outcomes, folder, folds)
    if pooled.outcomes:
        failed = f" Not answered: {'; '.join(pooled.failures)}." if pooled.failures else ""
        text = f"{pooled.explanation()} {pooled.spread()}{failed}"
        header = ReportHeader(f"{pooled.model.name}, cross-validation", text, folds)
        write_report(pooled.outcomes, header, specimens, folder / "report.html")
        console.print(f"wrote {folder / 'report.html'}, errors.csv and summary.csv")


def write_card_section(pooled: PooledOutcomes) -> None:
    """Write the metrics, and what they are of, into the model card."""
    key = BOTH_NETWORKS if pooled.is_refine else FIRST_ALONE
    title = "Cross-validation of both networks" if pooled.is_refine else "Cross-validation"
    parts = [
        f"## {title}",
        f"{pooled.explanation()} What the options left open was chosen once, from all scans.",
        metrics_table(dict(sections(pooled.outcomes, pooled.folds.by_scan()))),
        f"{MEANINGS}.",
        pooled.spread(),
    ]
    unknown = measure_presence(pooled.outcomes).unknown
    if unknown:
        parts.append(f"{UNKNOWN.format(unknown)}.")
    if pooled.failures:
        parts.append(f"Not answered: {'; '.join(pooled.failures)}.")
    write_section(pooled.model, key, "\n\n".join(parts))


def metrics_table(by_section: Mapping[str, Mapping[str, Cells]]) -> str:
    """Lay out the metrics of each fold and of all, in Markdown."""
    headings = {
        "mean mm": "mean_mm",
        "median": "median_mm",
        "95th percentile": "p95_mm",
        "largest": "largest_mm",
        **{f"≤ {mm:g} mm, %": key for mm, key in zip(WITHIN_MM, WITHIN, strict=True)},
    }
    lines = [
        f"| answers | {' | '.join(headings)} | missed | invented |",
        "|---" * (len(headings) + 3) + "|",
    ]
    folds = {f"fold {name}": cells for name, cells in by_section.get("fold", {}).items()}
    for name, cells in [*folds.items(), *by_section.get("all", {}).items()]:
        values = [cells[key] for key in headings.values()]
        missed = f"{cells['missed']} of {cells['present']}"
        invented = f"{cells['invented']} of {cells['absent']}"
        lines.append(f"| {' | '.join([name, *values, missed, invented])} |")
    return "\n".join(lines)
