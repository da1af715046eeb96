"""steps and validations -> what a training tells of itself: a bar, lines, a table and a picture."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.training.evaluate.outcomes import Outcome, summary
from app.training.fit.history import Moment, draw_curves, read_history, write_history

REPORT_EVERY: Final = 50


class Diary:
    """What a training tells of itself: a bar, lines, a table and a picture."""

    def __init__(self, folder: Path, console: Console, steps: int, first: int) -> None:
        """Args: the model folder, what to report to, all steps, and those done before."""
        self._folder, self._console, self._steps = folder, console, steps
        self._moments = read_history(folder, first)
        spent = self._moments[-1].seconds if self._moments else 0.0
        self._start = time.monotonic() - spent
        self._losses: deque[tuple[float, float]] = deque(maxlen=REPORT_EVERY)
        self.progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self.progress.add_task("", total=steps, completed=first)

    def note(self, step: int, losses: tuple[float, float]) -> None:
        """Take down the losses of a step, and tell their mean now and then."""
        self._losses.append(losses)
        self.progress.update(self._task, completed=step)
        if step % REPORT_EVERY == 0:
            now = self._now(step)
            told = f"score {now.score_loss:.3f} offset {now.offset_loss:.3f}"
            self.progress.update(self._task, description=told)
            if not self._console.is_terminal:
                self._console.print(f"step {step} of {self._steps}: {told}")
            self._keep(now)

    def judge(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Take down how a network does on the scans held out, and draw it all."""
        now = self._now(step)
        told = "saved (no scans held out, so no error)"
        if outcomes:
            told = summary(outcomes)
            missed = sum(mark.present and mark.found_mm is None for mark in outcomes)
            now = replace(now, missed=missed)
        errors = np.array([mark.error_mm for mark in outcomes if np.isfinite(mark.error_mm)])
        if errors.size:
            p95 = float(np.percentile(errors, 95))
            now = replace(now, mean_mm=float(errors.mean()), p95_mm=p95)
        self._console.print(f"step {step}: {told}", highlight=False)
        self._keep(now)
        draw_curves(self._folder, self._moments, self._folder.name)

    def interrupted(self, step: int) -> None:
        """Say how to go on."""
        self._keep(self._now(step))
        self._console.print(
            f"stopped after step {step} of {self._steps}, and saved: "
            "the same command goes on from here"
        )

    def _now(self, step: int) -> Moment:
        score, offset = np.mean(self._losses, axis=0)
        return Moment(step, float(score), float(offset), time.monotonic() - self._start)

    def _keep(self, now: Moment) -> None:
        kept = [moment for moment in self._moments if moment.step < now.step]
        self._moments = [*kept, now]
        write_history(self._folder, self._moments)
