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


@pytest.mark.parametrize(
    ("name", "form"),
    [("one.mrk.json", "mrk.json"), ("all.csv", "csv"), ("all.long", "long"), ("a.json", "dcm")],
)
def test_no_folder_is_made_of_the_name_of_a_single_answer(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / name
    with pytest.raises(SystemExit):
        output_format(str(target), form, to_folder=True)
    assert f"expected -o FOLDER for several scans as {form}, or" in capsys.readouterr().err
    assert output_format(str(target), form, to_folder=False).name == form
    assert output_format(f"{target}/", form, to_folder=True).name == form
    target.mkdir()
    assert output_format(str(target), form, to_folder=True).name == form
    assert output_format(str(tmp_path / "table.csv"), None, to_folder=True).name == "long"
