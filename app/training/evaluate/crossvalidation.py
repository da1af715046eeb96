"""answers of the models of all folds -> tables, a report, and a section of the model's card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

from rich.console import Console

from app.training.data.folds import FOLDS, Folds
from app.training.evaluate.metrics import WITHIN_MM, measure_presence
from app.training.evaluate.model_card import write_section
from app.training.evaluate.outcomes import Outcome, Pair
from app.training.evaluate.report import About, write_report
from app.training.evaluate.spread import Spread, measure_spread, say_spread
from app.training.evaluate.tables import (
    MEANINGS,
    UNKNOWN,
    WITHIN,
    Figures,
    print_tables,
    sections,
    write_csv,
    write_tables,
)

SPREAD: Final = "spread.csv"


@dataclass(frozen=True, slots=True)
class Pooled:
    """What the models of all folds answered, each to scans that it never saw.

    Attributes:
        model: Folder of the model whose folds they are.
        folds: Who was left out together.
        outcomes: One for each scan and landmark.
        failures: A line for each scan that could not be answered.
        second: Whether both networks answered, not the first one alone.
    """

    model: Path
    folds: Folds
    outcomes: tuple[Outcome, ...]
    failures: tuple[str, ...]
    second: bool

    @property
    def folder(self) -> Path:
        """Where its tables are."""
        return self.model / FOLDS / "refine" if self.second else self.model / FOLDS

    def spread(self) -> Spread | None:
        """Measure how much the mean error varies."""
        return measure_spread(self.outcomes, self.folds.subjects, self.folds.of_scans())

    def meaning(self) -> str:
        """Say what the figures are of."""
        count, scans = len(self.folds.members), len(self.folds.of_scans())
        share, more = Fraction(count - 1, count), len(self.folds.digests) - scans
        of = "pairs of networks" if self.second else "models of one network"
        rest = f" and on {more} more that are never judged by" if more else ""
        return (
            "These are figures of cross-validation: not of the model that is served but of "
            f"{count} {of} that were trained alike, each on about {share} of the {scans} scans"
            f"{rest}, and answered those that it never saw. The model that is served was trained "
            "alike on all of them."
        )


def conclude(pooled: Pooled, pairs: Sequence[Pair], console: Console) -> None:
    """Print and write what all folds say: tables, CSV files, and a report if it can be drawn.

    Args:
        pooled: The answers.
        pairs: Name, scan and landmark file of each specimen.
        console: What to report to.
    """
    folder, folds = pooled.folder, pooled.folds.of_scans()
    folder.mkdir(parents=True, exist_ok=True)
    spread = pooled.spread()
    print_tables(pooled.outcomes, console, folds)
    console.print(say_spread(spread), highlight=False)
    for failure in pooled.failures:
        console.print(f"[red]{failure}[/red]", highlight=False, soft_wrap=True)
    write_tables(pooled.outcomes, folder, folds)
    write_csv(folder / SPREAD, spread_lines(spread))
    if pooled.outcomes:
        failed = f" Not answered: {'; '.join(pooled.failures)}." if pooled.failures else ""
        text = f"{pooled.meaning()} {say_spread(spread)}{failed}"
        title = f"{pooled.model.name}, cross-validation"
        write_report(pooled.outcomes, About(title, text, folds), pairs, folder / "report.html")
        console.print(f"wrote {folder / 'report.html'}, errors.csv, summary.csv and {SPREAD}")


def spread_lines(spread: Spread | None) -> list[list[object]]:
    """List how much the mean error varies, a line for each figure."""
    lines: list[list[object]] = [["figure", "value"]]
    if spread is not None:
        lines += [
            ["specimens", spread.specimens],
            ["mean_over_specimens_mm", f"{spread.mean_mm:.4f}"],
            ["deviation_over_specimens_mm", f"{spread.specimens_mm:.4f}"],
            ["bootstrap_low_mm", f"{spread.low_mm:.4f}"],
            ["bootstrap_high_mm", f"{spread.high_mm:.4f}"],
            ["folds", spread.folds],
            ["deviation_over_folds_mm", f"{spread.folds_mm:.4f}"],
        ]
    return lines


def describe(pooled: Pooled) -> None:
    """Write a section of the model's card: the figures, and what they are of."""
    key = "crossvalidation of both networks" if pooled.second else "crossvalidation"
    title = "Cross-validation of both networks" if pooled.second else "Cross-validation"
    parts = [
        f"## {title}",
        f"{pooled.meaning()} What the options left open was chosen once, of all scans.",
        figure_table(dict(sections(pooled.outcomes, pooled.folds.of_scans()))),
        f"{MEANINGS}.",
        say_spread(pooled.spread()),
    ]
    unknown = measure_presence(pooled.outcomes).unknown
    if unknown:
        parts.append(f"{UNKNOWN.format(unknown)}.")
    if pooled.failures:
        parts.append(f"Not answered: {'; '.join(pooled.failures)}.")
    write_section(pooled.model, key, "\n\n".join(parts))


def figure_table(lines: Mapping[str, Mapping[str, Figures]]) -> str:
    """Lay out the figures of each fold and of all, in Markdown."""
    headings = {
        "mean mm": "mean_mm",
        "median": "median_mm",
        "95th percentile": "p95_mm",
        "largest": "largest_mm",
        **{f"≤ {mm:g} mm, %": key for mm, key in zip(WITHIN_MM, WITHIN, strict=True)},
    }
    rows = [
        f"| answers | {' | '.join(headings)} | missed | invented |",
        "|---" * (len(headings) + 3) + "|",
    ]
    named = {f"fold {name}": cells for name, cells in lines.get("fold", {}).items()}
    for name, cells in [*named.items(), *lines.get("all", {}).items()]:
        values = [cells[key] for key in headings.values()]
        missed = f"{cells['missed']} of {cells['present']}"
        invented = f"{cells['invented']} of {cells['absent']}"
        rows.append(f"| {' | '.join([name, *values, missed, invented])} |")
    return "\n".join(rows)
