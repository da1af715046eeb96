"""Commands of the trainer are commands of ``landmarkd``, and are imported only when used."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from app.cli import plugins
from app.cli.main import app
from tests.support.model_folders import make_model_folder


def shout(word: Annotated[str, typer.Argument()], times: int = 2) -> None:
    """Print a word several times."""
    typer.echo(times * word.upper())


@pytest.fixture
def shouting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the commands of the trainer."""
    table: Mapping[str, str] = {"shout": f"{__name__}:shout"}
    monkeypatch.setattr("app.training.COMMANDS", table)


@pytest.mark.usefixtures("shouting")
def test_a_command_of_the_trainer_is_run_with_its_own_options() -> None:
    result = CliRunner().invoke(app, ["shout", "ho", "--times", "3"])
    assert (result.exit_code, result.stdout) == (0, "HOHOHO\n")
    assert "Usage: root shout" in CliRunner().invoke(app, ["shout", "--help"]).stdout


@pytest.mark.usefixtures("shouting")
def test_help_lists_it_after_the_commands_of_the_service() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert text.index("serve") < text.index("phantom") < text.index("Print a word several times")


def test_without_the_trainer_its_commands_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "TRAINER", "app.no_such_package")
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    result = CliRunner().invoke(app, ["shout", "ho"])
    assert result.exit_code == 2
    assert "No such command 'shout'" in result.stderr


def test_without_the_trainer_a_model_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "app.training", None)
    result = CliRunner().invoke(app, ["check", str(make_model_folder(tmp_path)), "--device", "cpu"])
    assert result.exit_code == 0, result.output


def test_missing_dependency_of_the_trainer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for the absence of the trainer."""
    monkeypatch.setattr("app.training.COMMANDS", {"shout": "no_such_package:shout"})
    result = CliRunner().invoke(app, ["shout", "ho"])
    assert isinstance(result.exception, ModuleNotFoundError)


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["train", "--help"], ["serve", "--help"]]
)
def test_neither_help_nor_the_service_waits_for_the_trainer(words: list[str]) -> None:
    """Of the trainer, the help imports only the signatures of its commands."""
    script = f"""
import sys
from app.cli.main import app
try:
    app({words!r})
except SystemExit:
    parts = {{name.split(".")[2] for name in sys.modules if name.startswith("app.training.")}}
    print("torch" in sys.modules, "matplotlib" in sys.modules, *sorted(parts))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    expected = "False False" if words[0] in ("serve", "--version") else "False False cli files"
    assert done.stdout.splitlines()[-1] == expected
