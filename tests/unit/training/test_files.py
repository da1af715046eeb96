"""What the files of a training that has written no model yet say of its progress."""

import json
from pathlib import Path

import pytest

from app.training import describe_unfinished
from app.training.files import RECORD
from app.training.fit.history import HistoryRow, write_history


def begin(folder: Path, steps: int) -> None:
    (folder / RECORD).write_text(json.dumps({"recipe": {"steps": steps}}))


@pytest.mark.parametrize(
    ("steps", "done", "written"),
    [(4500, 0, 500), (4500, 350, 500), (4500, 500, 1000), (80, 50, 80)],
)
def test_the_step_and_when_the_model_is_written_are_described(
    tmp_path: Path, steps: int, done: int, written: int
) -> None:
    begin(tmp_path, steps)
    if done:
        write_history(tmp_path, [HistoryRow(50, 2.0, 0.5, 9.0), HistoryRow(done, 1.0, 0.5, 9.0)])
    output = describe_unfinished(tmp_path) or ""
    assert f"stands at step {done} of {steps} and writes the model at step {written};" in output


def test_a_model_and_a_folder_without_a_training_are_not_unfinished(tmp_path: Path) -> None:
    assert describe_unfinished(tmp_path) is None
    begin(tmp_path, 10)
    assert describe_unfinished(tmp_path) is not None
    (tmp_path / "model.toml").touch()
    assert describe_unfinished(tmp_path) is None
