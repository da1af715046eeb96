"""Progress of a training: a bar, log lines, and the history with its plot."""

import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.training.data.issues import print_warning
from app.training.evaluate.outcomes import Measurement, summarise_errors
from app.training.fit.history import HistoryRow, draw_curves, read_history, write_history

REPORT_EVERY: Final = 50


class TrainingProgress:
    """Reports the progress of a training to a console and to the model folder."""

    def __init__(self, folder: Path, console: Console, steps: int, done: int) -> None:
        """Start to report a training of which some steps were done before."""
        self._folder, self._console, self._steps = folder, console, steps
        self._history = read_history(folder, done)
        spent = self._history[-1].seconds if self._history else 0.0
        self._start = time.monotonic() - spent
        self._losses: deque[tuple[float, float]] = deque(maxlen=REPORT_EVERY)
        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self.bar.add_task("", total=steps, completed=done)

    def record_step(self, step: int, losses: tuple[float, float]) -> None:
        """Record the losses of a step; print and save their mean now and then."""
        self._losses.append(losses)
        self.bar.update(self._task, completed=step)
        if step % REPORT_EVERY == 0:
            row = self._current(step)
            text = f"score {row.score_loss:.3f} offset {row.offset_loss:.3f}"
            self.bar.update(self._task, description=text)
            if not self._console.is_terminal:
                self._console.print(f"step {step} of {self._steps}: {text}")
            self._save(row)

    def record_validation(self, step: int, measured: Measurement | None) -> None:
        """Record what came of the held-out scans, if there are any, and plot the history."""
        row = self._current(step)
        text = "saved (no scans held out, so no error)"
        outcomes = measured.outcomes if measured else ()
        if measured:
            print_warning("\n".join(measured.failures), self._console)
            text = "saved (no held-out scan was answered, so no error)"
        if outcomes:
            text = summarise_errors(outcomes)
            not_found = sum(one.present and one.found_mm is None for one in outcomes)
            row = replace(row, not_found=not_found)
        errors = np.array([one.error_mm for one in outcomes if np.isfinite(one.error_mm)])
        if errors.size:
            p95 = float(np.percentile(errors, 95))
            row = replace(row, mean_mm=float(errors.mean()), p95_mm=p95)
        self._console.print(f"step {step}: {text}", highlight=False)
        self._save(row)
        if len(self._history) > 1:  # One row makes no curve.
            draw_curves(self._folder, self._history, self._folder.name)

    def record_interruption(self, step: int) -> None:
        """Print where the training stands, and save the history, unless a validation just has."""
        if not self._history or self._history[-1].step < step:
            self._save(self._current(step))
        self._console.print(f"interrupted after step {step} of {self._steps}")

    def _current(self, step: int) -> HistoryRow:
        score, offset = np.mean(self._losses, axis=0)
        return HistoryRow(step, float(score), float(offset), time.monotonic() - self._start)

    def _save(self, row: HistoryRow) -> None:
        self._history = [*(one for one in self._history if one.step < row.step), row]
        write_history(self._folder, self._history)
