"""Outcomes <-> outcomes.json: what a model answered, kept to the last bit."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from app.training.evaluate.outcomes import Outcome

OUTCOMES: Final = "outcomes.json"

PLACES: Final = ("true_mm", "found_mm")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a model answered to scans.

    Attributes:
        outcomes: One for each scan and landmark.
        failures: A line for each scan that could not be read or answered.
    """

    outcomes: tuple[Outcome, ...]
    failures: tuple[str, ...]


def write_outcomes(folder: Path, outcomes: Sequence[Outcome], failures: Sequence[str]) -> None:
    """Write what a model answered; the file is there whole or not at all."""
    table = {"failures": list(failures), "outcomes": [asdict(outcome) for outcome in outcomes]}
    partial = folder / f"{OUTCOMES}.partial"
    # Python writes floats with as many digits as tell them apart, and also NaN and Infinity.
    partial.write_text(json.dumps(table, default=np.ndarray.tolist) + "\n", encoding="utf-8")
    partial.replace(folder / OUTCOMES)


def read_outcomes(folder: Path) -> Measured | None:
    """Read what a model answered; None if it has not been measured."""
    path = folder / OUTCOMES
    if not path.exists():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    outcomes = []
    for row in table["outcomes"]:
        points = {name: None if row[name] is None else np.array(row[name]) for name in PLACES}
        outcomes.append(Outcome(**(row | points)))
    return Measured(tuple(outcomes), tuple(table["failures"]))
