"""Cases -> Rows: both sides proven equal, then timed in turns.

A bar yields cases, in which one thing of ours meets rivals that compute the same, or rows, for what
is no time. The rule of the house: no time is taken before ``agree`` has seen both results.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

ROUND_S: Final = 0.02
"""A side's turn lasts at least this long, by repeating what is short: a call of 50 microseconds
says nothing by itself, and threads of another library's pool may still be spinning at its start."""

ROUNDS: Final = 5
FAST_ROUNDS: Final = 2

CASE_S: Final = 3.0
"""Rounds of what is short go on for so long: the machine's pace changes from second to second."""


class DisagreementError(Exception):
    """Two sides do not compute the same; what they take for it is of no interest then."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What a bar demands of a ratio, or of our figure itself.

    Attributes:
        value: The bar; None: there is none, and ``of`` only says which way the ratio goes.
        of: ``speed`` is theirs / ours and must reach it; ``cost`` is ours / theirs and ``figure``
            is ours alone, and neither may exceed it.
    """

    value: float | None
    of: Literal["speed", "cost", "figure"] = "speed"

    def text(self, unit: str = "") -> str:
        """Write the bar as it stands in the table."""
        if self.value is None:
            return ""
        if self.of == "figure":
            return f"≤ {self.value:g} {unit}".strip()
        return f"{'≥' if self.of == 'speed' else '≤'} {self.value:g}x"

    def met(self, ours: float, theirs: float | None) -> bool | None:
        """Say whether figures keep to it; None if nothing is demanded."""
        if self.value is None:
            return None
        if self.of == "speed":
            return theirs is not None and theirs >= self.value * ours
        return ours <= self.value * (1.0 if self.of == "figure" else theirs or 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was measured.
        ours: Our figure; None: not measured.
        unit: Of both figures.
        rival: Who else.
        theirs: Their figure, if there is one.
        limit: What the bar demands; None: shown for interest.
        note: Why something was not measured, or how.
        rounds: How many rounds the figures are medians of; 0: they are no times.
    """

    what: str
    ours: float | None
    unit: str = "ms"
    rival: str = ""
    theirs: float | None = None
    limit: Limit | None = None
    note: str = ""
    rounds: int = 0

    @property
    def ratio(self) -> float | None:
        """Theirs / ours; of a cost, ours / theirs."""
        if not self.ours or not self.theirs:
            return None
        cost = self.limit is not None and self.limit.of == "cost"
        return self.ours / self.theirs if cost else self.theirs / self.ours

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None: not measured, or no bar."""
        if self.limit is None or self.ours is None:
            return None
        return self.limit.met(self.ours, self.theirs)


@dataclass(frozen=True, slots=True)
class Rival:
    """Another way to do the same, or a limit of what is possible.

    Attributes:
        name: As in the table.
        run: Does it once.
        agree: Gets our result and theirs; raises DisagreementError where they differ.
        limit: What the bar demands of us against it.
    """

    name: str
    run: Callable[[], object]
    agree: Callable[..., None]
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Something of ours and its rivals.

    Attributes:
        what: As in the table.
        run: Does ours once.
        rivals: Who does the same.
        note: How, where that is not obvious.
    """

    what: str
    run: Callable[[], object]
    rivals: tuple[Rival, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """How to measure.

    Attributes:
        fast: Small sizes and few rounds: shows that everything works, not how fast it is.
        minutes: How long chaos lasts.
    """

    fast: bool = False
    minutes: float = 10.0

    @property
    def rounds(self) -> int:
        """How many rounds to take the median of, at least."""
        return FAST_ROUNDS if self.fast else ROUNDS

    @property
    def case_s(self) -> float:
        """How long to go on with more rounds."""
        return 0.0 if self.fast else CASE_S


Bar = Callable[[Run], Iterator[Case | Row]]


def measure_bar(bar: Bar, run: Run) -> Iterator[Row]:
    """Measure all cases of a bar, one after the other, so that each has the memory for itself.

    Raises:
        DisagreementError: A rival and we do not compute the same.
    """
    for item in bar(run):
        if isinstance(item, Row):
            yield item
        else:
            yield from measure_case(item, run.rounds, run.case_s)
        del item
        if not run.fast:
            gc.collect()


def measure_case(case: Case, rounds: int, case_s: float = 0.0) -> list[Row]:
    """Check that all sides agree, then time them in turns.

    Args:
        case: What to measure.
        rounds: How often, at least.
        case_s: For how long, at least.

    Returns:
        One row per rival, times in ms.

    Raises:
        DisagreementError: A rival and we do not compute the same.
    """
    check(case)
    sides = [case.run, *(rival.run for rival in case.rivals)]
    (ours, *theirs), rounds = median_times(sides, rounds, case_s)
    return [
        Row(case.what, ours, "ms", rival.name, spent, rival.limit, case.note, rounds)
        for rival, spent in zip(case.rivals, theirs, strict=True)
    ]


def check(case: Case) -> None:
    """Check that all sides of a case agree."""
    result = case.run()
    for rival in case.rivals:
        try:
            rival.agree(result, rival.run())
        except DisagreementError as error:
            raise DisagreementError(f"{case.what}, ours and {rival.name}: {error}") from error


def median_times(
    sides: Sequence[Callable[[], object]], rounds: int, case_s: float = 0.0
) -> tuple[list[float], int]:
    """Time some functions in turns, so that a machine that slows down does so for all.

    Args:
        sides: What to time.
        rounds: Turns of each at least, after a call to warm up.
        case_s: More of them follow until this has passed.

    Returns:
        Median time per call of each, in ms; and how many turns each had.
    """
    # The check was the first call, which may have compiled something; this is the second.
    repeats = [math.ceil(ROUND_S / max(_seconds(side, 1), 1e-6)) for side in sides]
    spent: list[list[float]] = [[] for _ in sides]
    end = time.perf_counter() + case_s
    while len(spent[0]) < rounds or time.perf_counter() < end:
        for side, repeat, times in zip(sides, repeats, spent, strict=True):
            times.append(1e3 * _seconds(side, repeat))
    return [statistics.median(times) for times in spent], len(spent[0])


def _seconds(side: Callable[[], object], repeat: int) -> float:
    """Time one call, the device's work included."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        side()
    _synchronize()
    return (time.perf_counter() - start) / repeat


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
