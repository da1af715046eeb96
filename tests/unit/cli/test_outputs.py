"""Where answers go, and in which format."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from app.cli.outputs import choose_sink, choose_writer, output_format
from tests.support.answers import make_answer

ANSWER = make_answer(["1", "2"], np.zeros((2, 3)))


@pytest.mark.parametrize(("name", "watched"), [("json", True), ("json", False), ("tsv", True)])
def test_json_is_indented_for_a_terminal_alone(
    name: str, watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # It has no colours.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: watched)
    form = output_format("", name, to_folder=False)
    write = choose_writer(form, None)
    path = Path("scan.nii")
    sink = choose_sink([path], None, form, write, to_folder=False, resume=False)
    sink.write(path, ANSWER)
    printed = capsys.readouterr().out
    if name == "json":
        assert json.loads(printed) == ANSWER.model_dump(mode="json")
        indented = printed.startswith('{\n  "request_id"')
        assert indented == watched
    else:
        assert printed == f"{write(path, ANSWER).decode()}\n"
