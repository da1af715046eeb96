"""The history of a training as a table and as a plot."""

from pathlib import Path

import pytest

from app.training.files import CURVES
from app.training.fit.history import HistoryRow, draw_curves, read_history, write_history


def test_history_of_repeated_steps_is_dropped(tmp_path: Path) -> None:
    moments = [HistoryRow(50, 2.0, 0.5, 9.0), HistoryRow(100, 1.5, 0.25, 18.5, 0.75, 1.5, 3)]
    write_history(tmp_path, moments)
    assert read_history(tmp_path, 100) == moments
    assert read_history(tmp_path, 99) == moments[:1]
    assert read_history(tmp_path / "other", 99) == []


@pytest.mark.parametrize("measured", [False, True])
def test_curves_need_no_display(tmp_path: Path, measured: bool) -> None:
    error = (0.75, 1.5, 3) if measured else (None, None, None)
    draw_curves(
        tmp_path, [HistoryRow(50, 2.0, 0.5, 9.0), HistoryRow(100, 1.0, 0.5, 9.0, *error)], ""
    )
    assert (tmp_path / CURVES).stat().st_size > 5000
