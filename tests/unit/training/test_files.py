"""What the files of a training that has written no model yet say of its progress."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from app.errors import StartupError
from app.training import describe_unfinished
from app.training.data.folds import read_folds
from app.training.evaluate.outcomes import read_outcomes
from app.training.files import CHECKPOINT, FOLDS, HISTORY, OUTCOMES, RECORD
from app.training.fit.checkpoint import resume, save
from app.training.fit.history import HistoryRow, read_history, write_history
from app.training.record import read_record


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


@pytest.mark.parametrize(
    ("record", "named"),
    [("", RECORD), ("[]", RECORD), ("{}", RECORD), ('{"recipe": {"steps": 10}}', HISTORY)],
)
def test_damaged_files_of_an_unfinished_training_are_named(
    tmp_path: Path, record: str, named: str
) -> None:
    """``landmarkd check`` ended in a traceback."""
    (tmp_path / RECORD).write_text(record)
    (tmp_path / HISTORY).write_text("step,score_loss\n50,1.0\n5?,1.0\n")
    with pytest.raises(StartupError, match=rf"expected \S*/{named} as .* got \w+Error"):
        describe_unfinished(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, -100])
def test_a_damaged_file_is_named_and_said_how_to_go_on(tmp_path: Path, kept: int) -> None:
    """As a full disk of another program, or a copy that was cut off, leaves it."""
    begin(tmp_path, 10)
    save(tmp_path, {"network": nn.Linear(2, 2)}, 5, exported=True)
    for name in (RECORD, CHECKPOINT):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:kept])
    with pytest.raises(StartupError, match=rf"expected \S*{RECORD} as .* into another folder"):
        read_record(tmp_path)
    with pytest.raises(StartupError, match=rf"expected \S*{CHECKPOINT} as .* into another folder"):
        resume(tmp_path, {"network": nn.Linear(2, 2)})


FOREIGN = ["[]", '{"train": 7, "members": {}}', '"members"', "step\n1\n", "\x00"]
READERS: list[tuple[str, Callable[[Path], object], list[str]]] = [
    (RECORD, read_record, FOREIGN),
    (f"{FOLDS}/folds.json", read_folds, FOREIGN),
    (OUTCOMES, read_outcomes, [*FOREIGN, '{"outcomes": [{"scan": "a"}], "failures": []}']),
    (
        HISTORY,
        lambda folder: read_history(folder, 10),
        ["step\n1\n", "step,score_loss\n50,1.0\n5?,1"],
    ),
]


@pytest.mark.parametrize(
    ("name", "read", "content"),
    [(name, read, content) for name, read, contents in READERS for content in contents],
)
def test_a_file_of_something_else_is_refused_by_its_name(
    name: str, read: Callable[[Path], object], content: str, tmp_path: Path
) -> None:
    """As of another program, or changed by hand: each was a traceback."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(
        StartupError, match=rf"expected {path} as .* got \w+Error: .* another folder"
    ):
        read(tmp_path)


def test_a_checkpoint_of_something_else_is_refused_by_its_name(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / CHECKPOINT)
    with pytest.raises(StartupError, match=rf"expected \S*{CHECKPOINT} as .* got no checkpoint"):
        resume(tmp_path, {"network": nn.Linear(2, 2)})
